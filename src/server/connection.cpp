// SPDX-License-Identifier: Apache-2.0
#include "server/connection.h"

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/bind_handler.hpp>
#include <boost/beast/http/read.hpp>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "server/http_coding.h"
#include "server/request_error.h"

namespace ikbo::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

constexpr std::size_t kMaxHeadBytes = 16 * 1024;
constexpr boost::string_view kJsonSizeField = "Inference-Header-Content-Length";
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

bool is_http_error(const boost::system::error_code& error) {
  return error.category() == http::make_error_code(http::error::bad_method).category();
}

RequestError no_memory() {
  return RequestError(ErrorKind::kOutOfMemory,
                      "the server has no memory for the request's body now");
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, ConnectionContext& context)
    : stream_(std::move(socket), context.tls), context_(context) {
  ++context_.metrics.connections;
}

Connection::~Connection() {
  --context_.metrics.connections;
  context_.on_end(this);
}

void Connection::start() {
  asio::dispatch(stream_.get_executor(), [self = shared_from_this()] {
    if (!self->stream_.has_tls()) {
      return self->next_request();
    }
    self->stream_.tcp().expires_after(self->context_.options.read_timeout);
    self->stream_.async_handshake([self](ErrorCode error) { self->on_handshake(error); });
  });
}

void Connection::on_handshake(ErrorCode error) {
  if (error) {
    context_.metrics.count(ErrorKind::kTlsHandshake);
    context_.logger.write(LogLevel::kDebug, "dropped", {{"error", error.message()}});
    return close();
  }
  next_request();
}

void Connection::stop() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    ErrorCode error;
    // A request that has arrived already is answered.
    if (self->is_idle_ && self->stream_.tcp().socket().available(error) == 0) {
      self->close();
    }
  });
}

void Connection::next_request() {
  response_.reset();
  body_.reset();
  record_.reset();
  if (buffer_.size() > 0) {
    return read_head();
  }
  ErrorCode error;
  if (context_.is_stopping && stream_.tcp().socket().available(error) == 0) {
    return close();
  }
  is_idle_ = true;
  stream_.tcp().expires_after(context_.options.idle_timeout);
  stream_.async_read_some(
      buffer_.prepare(kReadAhead),
      beast::bind_front_handler(&Connection::on_first_bytes, shared_from_this()));
}

void Connection::on_first_bytes(ErrorCode error, std::size_t bytes) {
  is_idle_ = false;
  if (error) {
    return close();
  }
  buffer_.commit(bytes);
  read_head();
}

void Connection::read_head() {
  begin_ = std::chrono::steady_clock::now();
  parser_.emplace();
  parser_->header_limit(kMaxHeadBytes);
  // The body is not the parser's. (boost::none refuses every body in Boost 1.74.)
  parser_->body_limit(std::numeric_limits<std::uint64_t>::max());
  stream_.tcp().expires_after(context_.options.read_timeout);
  http::async_read_header(
      stream_, buffer_, *parser_,
      [self = shared_from_this()](ErrorCode error, std::size_t) { self->on_head(error); });
}

void Connection::on_head(ErrorCode error) {
  if (error == http::error::header_limit) {
    return refuse_and_end(RequestError(ErrorKind::kHeadersTooLarge,
                                       "the request's head must have at most " +
                                           std::to_string(kMaxHeadBytes) + " bytes; got more"));
  }
  if (error == http::error::end_of_stream) {
    return close();
  }
  if (error && is_http_error(error) && error != http::error::partial_message) {
    return refuse_and_end(
        RequestError(ErrorKind::kBadRequest, "the request must be HTTP/1.1: " + error.message()));
  }
  if (error) {
    return drop(error);
  }
  try {
    start_body();
  } catch (const RequestError& refusal) {
    refuse_and_end(refusal);
  } catch (const std::bad_alloc&) {
    refuse_and_end(no_memory());
  }
}

void Connection::start_body() {
  const auto& head = parser_->get();
  BodyFields fields;
  fields.is_chunked = parser_->chunked();
  if (const auto length = parser_->content_length()) {
    fields.content_length = *length;
  }
  fields.content_encoding = view(head[http::field::content_encoding]);
  if (const auto field = head.find(kJsonSizeField); field != head.end()) {
    fields.json_size = view(field->value());
  }
  plan_ = plan_body(fields, context_.options.max_body_bytes);
  const bool is_packed = plan_.coding != Coding::kIdentity;
  body_ = std::make_shared<RequestBody>(
      plan_.size, is_packed ? plan_.size : plan_.json_size.value_or(plan_.size),
      context_.memory.take(plan_.size));
  if (beast::iequals(head[http::field::expect], "100-continue") && buffer_.size() < plan_.size) {
    send_continue();
  } else {
    read_body();
  }
}

void Connection::send_continue() {
  stream_.tcp().expires_after(context_.options.write_timeout);
  asio::async_write(stream_, asio::buffer(kContinue),
                    [self = shared_from_this()](ErrorCode error, std::size_t) {
                      if (error) {
                        self->drop(error);
                      } else {
                        self->read_body();
                      }
                    });
}

void Connection::read_body() {
  const std::span<std::byte> bytes = body_->bytes();
  const std::size_t have = std::min(buffer_.size(), bytes.size());
  if (have > 0) {
    std::memcpy(bytes.data(), buffer_.data().data(), have);
    buffer_.consume(have);
  }
  if (have == bytes.size()) {
    return dispatch();
  }
  stream_.tcp().expires_after(context_.options.read_timeout);
  asio::async_read(
      stream_, asio::buffer(bytes.data() + have, bytes.size() - have),
      [self = shared_from_this()](ErrorCode error, std::size_t) { self->on_body(error); });
}

void Connection::on_body(ErrorCode error) {
  if (error) {
    return drop(error);
  }
  dispatch();
}

void Connection::dispatch() {
  const auto& head = parser_->get();
  try {
    if (plan_.coding != Coding::kIdentity) {
      body_ = unpack_body(*body_, plan_.coding, plan_.json_size, context_.options.max_body_bytes,
                          context_.memory);
    }
  } catch (const RequestError& refusal) {
    return reply(context_.router.error_reply(refusal));
  } catch (const std::bad_alloc&) {
    return reply(context_.router.error_reply(no_memory()));
  }
  HttpRequest request;
  request.method = view(head.method_string());
  request.target = view(head.target());
  request.body = std::move(body_);
  begin_record();
  request.record = record_;
  context_.router.handle(std::move(request),
                         [self = shared_from_this()](std::function<HttpReply()> make) {
                           asio::post(self->stream_.get_executor(),
                                      [self, make = std::move(make)] { self->reply(make()); });
                         });
}

void Connection::begin_record() {
  record_ = std::make_shared<RequestRecord>();
  record_->protocol = "http";
  record_->begin = begin_;
  record_->read = std::chrono::steady_clock::now();
  if (context_.observer == nullptr) {
    return;
  }
  const auto& head = parser_->get();
  // Two of them are none.
  const bool has_parent = head.count("traceparent") == 1;
  std::string state;
  const auto [first, last] = head.equal_range("tracestate");
  for (auto field = first; field != last; ++field) {
    state.append(state.empty() ? "" : ",").append(view(field->value()));
  }
  context_.observer->begin(*record_, has_parent ? view(head["traceparent"]) : "", state);
}

void Connection::refuse_and_end(const RequestError& error) {
  has_unread_body_ = true;
  reply(context_.router.error_reply(error));
}

}  // namespace ikbo::server
