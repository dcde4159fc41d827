// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/vector_body.hpp>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "load.h"

namespace ikbo::load {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;

constexpr const char* kJsonSizeField = "Inference-Header-Content-Length";

std::string head_of(const LoadOptions& options, const LoadRequest& request) {
  return "POST /v2/models/" + options.model + "/infer HTTP/1.1\r\nHost: " + options.host +
         "\r\nContent-Length: " + std::to_string(request.body.size()) + "\r\n" + kJsonSizeField +
         ": " + std::to_string(request.json_size) + "\r\n\r\n";
}

// A request on its way.
struct Due {
  std::size_t request = 0;  // into the list of requests
  Clock::time_point due;
};

// One connection with at most one request at a time.
class HttpConnection {
 public:
  // `on_free` is called after each request, answered or not.
  HttpConnection(asio::io_context& io, tcp::endpoint server, LoadRecord& record,
                 std::function<void(HttpConnection&)> on_free)
      : stream_(io), server_(std::move(server)), record_(record), on_free_(std::move(on_free)) {}

  // Throws std::runtime_error.
  void connect() {
    ErrorCode error;
    stream_.connect(server_, error);
    if (error) {
      throw std::runtime_error("--host, --port: the server must accept connections; got " +
                               error.message());
    }
    stream_.socket().set_option(tcp::no_delay(true));
    is_open_ = true;
  }

  void send(const LoadRequest& request, const std::string& head, Clock::time_point due,
            std::chrono::milliseconds timeout) {
    request_ = &request;
    head_ = &head;
    due_ = due;
    sent_ = Clock::now();
    stream_.expires_after(timeout);
    if (is_open_) {
      return write();
    }
    stream_.async_connect(server_, [this](ErrorCode error) {
      if (error) {
        return fail(error, "connect");
      }
      error = stream_.socket().set_option(tcp::no_delay(true), error);
      is_open_ = true;
      write();
    });
  }

 private:
  void write() {
    const std::array<asio::const_buffer, 2> buffers = {asio::buffer(*head_),
                                                       asio::buffer(request_->body)};
    asio::async_write(stream_, buffers, [this](ErrorCode error, std::size_t) {
      if (error) {
        fail(error, "write");
      } else {
        read();
      }
    });
  }

  void read() {
    parser_.emplace();
    parser_->body_limit(std::numeric_limits<std::uint64_t>::max());  // boost::none: refuses any
    http::async_read(stream_, buffer_, *parser_, [this](ErrorCode error, std::size_t) {
      if (error) {
        fail(error, "read");
      } else {
        finish();
      }
    });
  }

  void finish() {
    const Clock::time_point done = Clock::now();
    const auto& answer = parser_->get();
    if (answer.result_int() == 200) {
      const auto json_size = answer.find(kJsonSizeField);
      const std::size_t skipped =
          json_size == answer.end()
              ? answer.body().size()
              : std::min<std::size_t>(std::stoul(std::string(json_size->value())),
                                      answer.body().size());
      record_.answered(*request_, due_, sent_, done,
                       std::as_bytes(std::span(answer.body()).subspan(skipped)));
    } else {
      record_.failed(due_, "status_" + std::to_string(answer.result_int()));
    }
    if (!answer.keep_alive()) {
      close();
    }
    on_free_(*this);
  }

  void fail(ErrorCode error, std::string_view step) {
    record_.failed(due_, error == beast::error::timeout ? "timeout" : step);
    close();
    on_free_(*this);
  }

  void close() {
    stream_.close();
    buffer_.clear();
    is_open_ = false;
  }

  beast::tcp_stream stream_;
  tcp::endpoint server_;
  LoadRecord& record_;
  std::function<void(HttpConnection&)> on_free_;
  beast::flat_buffer buffer_;
  std::optional<http::response_parser<http::vector_body<char>>> parser_;
  bool is_open_ = false;
  // The request under way:
  const LoadRequest* request_ = nullptr;
  const std::string* head_ = nullptr;
  Clock::time_point due_;
  Clock::time_point sent_;
};

class HttpLoad {
 public:
  HttpLoad(const LoadOptions& options, const std::vector<LoadRequest>& requests, Schedule& schedule,
           LoadRecord& record)
      : options_(options), requests_(requests), schedule_(schedule), timer_(io_) {
    for (const LoadRequest& request : requests) {
      heads_.push_back(head_of(options, request));
    }
    const tcp::endpoint server(asio::ip::make_address(options.host), options.port);
    for (int i = 0; i < options.connections; ++i) {
      connections_.push_back(std::make_unique<HttpConnection>(
          io_, server, record, [this](HttpConnection& free) { on_free(free); }));
      connections_.back()->connect();
      free_.push_back(connections_.back().get());
    }
  }

  void run() {
    schedule_.begin();
    wait();
    io_.run();
  }

 private:
  void wait() {
    if (next_ == schedule_.size()) {
      return;
    }
    timer_.expires_at(schedule_.due(next_));
    timer_.async_wait([this](ErrorCode) {
      const Clock::time_point now = Clock::now();
      while (next_ < schedule_.size() && schedule_.due(next_) <= now) {
        waiting_.push_back({next_ % requests_.size(), schedule_.due(next_)});
        ++next_;
        send_waiting();
      }
      wait();
    });
  }

  void send_waiting() {
    while (!waiting_.empty() && !free_.empty()) {
      HttpConnection& connection = *free_.back();
      free_.pop_back();
      const Due next = waiting_.front();
      waiting_.pop_front();
      connection.send(requests_[next.request], heads_[next.request], next.due, options_.timeout);
    }
  }

  void on_free(HttpConnection& connection) {
    free_.push_back(&connection);
    send_waiting();
  }

  const LoadOptions& options_;
  const std::vector<LoadRequest>& requests_;
  Schedule& schedule_;
  std::vector<std::string> heads_;  // by request
  asio::io_context io_{1};
  asio::steady_timer timer_;
  std::vector<std::unique_ptr<HttpConnection>> connections_;
  std::vector<HttpConnection*> free_;
  std::deque<Due> waiting_;  // for a free connection
  std::size_t next_ = 0;
};

}  // namespace

void run_http(const LoadOptions& options, const std::vector<LoadRequest>& requests,
              Schedule& schedule, LoadRecord& record) {
  HttpLoad(options, requests, schedule, record).run();
}

}  // namespace ikbo::load
