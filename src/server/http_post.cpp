// SPDX-License-Identifier: Apache-2.0
#include "server/http_post.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <charconv>
#include <cstdint>

#include "ikbo/error.h"

namespace ikbo::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

constexpr std::size_t kMaxReplyBytes = std::size_t{64} << 10;

bool is_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  return error == std::errc() && end == text.data() + text.size() && port > 0;
}

bool is_printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

// One post. Its steps are asynchronous so that each can time out; they run one after another.
class Post {
 public:
  explicit Post(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  PostResult run(const HttpUrl& url, const std::string& body) {
    asio::ip::tcp::resolver resolver(io_);
    boost::system::error_code error;
    const auto endpoints = resolver.resolve(url.host, url.port, error);
    if (!error) {
      error = step([&](auto done) { stream_.async_connect(endpoints, done); });
    }
    http::request<http::string_body> request(http::verb::post, url.target, 11, body);
    request.set(http::field::host, url.authority());
    request.set(http::field::user_agent, "ikbo-server/" IKBO_VERSION);
    request.set(http::field::content_type, "application/json");
    request.keep_alive(false);
    request.prepare_payload();
    if (!error) {
      error = step([&](auto done) { http::async_write(stream_, request, done); });
    }
    http::response_parser<http::string_body> reply;
    reply.body_limit(kMaxReplyBytes);
    beast::flat_buffer buffer;
    if (!error) {
      error = step([&](auto done) { http::async_read(stream_, buffer, reply, done); });
    }
    if (error) {
      return {0, error.message()};
    }
    return {reply.get().result_int(), reply.get().body()};
  }

 private:
  template <typename Start>
  boost::system::error_code step(const Start& start) {
    boost::system::error_code result;
    stream_.expires_after(timeout_);
    start([&](boost::system::error_code error, const auto&) { result = error; });
    io_.restart();
    io_.run();
    return result;
  }

  const std::chrono::milliseconds timeout_;
  asio::io_context io_;
  beast::tcp_stream stream_{io_};
};

}  // namespace

std::string HttpUrl::authority() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return (is_ipv6 ? "[" + host + "]" : host) + ":" + port;
}

HttpUrl parse_http_url(std::string_view text, std::string_view what) {
  constexpr std::string_view kScheme = "http://";
  HttpUrl url;
  std::string_view rest = text;
  bool is_good = rest.starts_with(kScheme) && is_printable(rest);
  rest.remove_prefix(std::min(kScheme.size(), rest.size()));
  if (const std::size_t slash = rest.find('/'); slash != std::string_view::npos) {
    url.target = rest.substr(slash);
    rest = rest.substr(0, slash);
  }
  const std::size_t closing = rest.starts_with('[') ? rest.find(']') : 0;
  const std::size_t colon = closing == std::string_view::npos ? closing : rest.find(':', closing);
  if (colon != std::string_view::npos) {
    url.port = rest.substr(colon + 1);
    rest = rest.substr(0, colon);
  }
  if (rest.starts_with('[') && rest.ends_with(']')) {
    rest = rest.substr(1, rest.size() - 2);
  }
  url.host = rest;
  is_good = is_good && !url.host.empty() && is_port(url.port) &&
            url.host.find_first_of("[]@?#") == std::string::npos;
  IKBO_CHECK(is_good, what, ": must be a URL http://host[:port][/path]; got '", text, "'");
  return url;
}

PostResult post_json(const HttpUrl& url, const std::string& body,
                     std::chrono::milliseconds timeout) {
  return Post(timeout).run(url, body);
}

}  // namespace ikbo::server
