// SPDX-License-Identifier: Apache-2.0
// The second half of a connection's turn: from the reply to the next request or to the end.
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/http/write.hpp>
#include <string_view>
#include <utility>

#include "server/connection.h"
#include "server/http_coding.h"
#include "server/request_error.h"

namespace ikbo::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

// How long a refused client may go on sending, so that it gets to read the reply.
constexpr std::chrono::seconds kLingerTime{2};

}  // namespace

void Connection::take(PendingReply pending) {
  const auto& head = parser_->get();
  if (pending.is_quick &&
      wanted_coding(view(head[http::field::accept_encoding])) == Coding::kIdentity) {
    HttpReply made = pending.make();
    pending.make = {};  // once the client has its answer the server may end, and what this holds
    return reply(std::move(made));
  }
  asio::post(stream_.get_executor(),
             [self = shared_from_this(), make = std::move(pending.make)] { self->reply(make()); });
}

void Connection::reply(HttpReply reply) {
  const auto& head = parser_->get();
  pack_reply(wanted_coding(view(head[http::field::accept_encoding])), reply);
  response_.emplace(http::int_to_status(reply.status), head.version());
  response_->set(http::field::content_type, reply.content_type);
  for (const auto& [name, value] : reply.headers) {
    response_->set(name, value);
  }
  response_->keep_alive(head.keep_alive() && !has_unread_body_ && !context_.is_stopping);
  response_->body() = std::move(reply);
  response_->prepare_payload();
  if (head.method() == http::verb::head) {
    response_->body() = {};  // its length alone
  }
  serializer_.emplace(*response_);
  send();
}

// What the socket takes at once, all of most replies, it gets from this thread; the rest waits for
// it. From then on the connection may be another thread's.
void Connection::send() {
  const std::function<void()> on_sent = std::move(response_->body().on_sent);
  const auto note_sent = [&on_sent] {
    if (on_sent) {
      on_sent();
    }
  };
  ErrorCode error;
  if (!stream_.has_tls()) {
    http::write_some(stream_.tcp(), *serializer_, error);
    const bool is_full = error == asio::error::would_block;
    if (!error) {
      note_sent();
    }
    if (serializer_->is_done() || (error && !is_full)) {
      return asio::dispatch(stream_.get_executor(),
                            [self = shared_from_this(), error] { self->on_replied(error); });
    }
  }
  stream_.tcp().expires_after(context_.options.write_timeout);
  http::async_write(
      stream_, *serializer_,
      [self = shared_from_this()](ErrorCode failure, std::size_t) { self->on_replied(failure); });
  if (stream_.has_tls()) {
    note_sent();  // by now
  }
}

void Connection::on_replied(ErrorCode error) {
  if (error) {
    return drop(error);
  }
  end_record();
  if (context_.logger.is_enabled(LogLevel::kDebug)) {
    const auto time = std::chrono::steady_clock::now() - begin_;
    context_.logger.write(
        LogLevel::kDebug, "request",
        {{"method", view(parser_->get().method_string())},
         {"target", view(parser_->get().target())},
         {"status", response_->result_int()},
         {"us", std::chrono::duration_cast<std::chrono::microseconds>(time).count()}});
  }
  if (has_unread_body_) {
    linger();
  } else if (!response_->keep_alive()) {
    end();
  } else {
    next_request();
  }
}

void Connection::end() {
  if (!stream_.has_tls()) {
    return close();
  }
  stream_.tcp().expires_after(kLingerTime);
  stream_.async_shutdown([self = shared_from_this()](ErrorCode) { self->close(); });
}

// Closing with unread input would reset the connection, and the client could lose the reply.
void Connection::linger() {
  ErrorCode ignored;
  ignored = stream_.tcp().socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  stream_.tcp().expires_after(kLingerTime);
  discard_input();
}

void Connection::discard_input() {
  buffer_.clear();
  stream_.tcp().async_read_some(buffer_.prepare(kReadAhead),
                                [self = shared_from_this()](ErrorCode error, std::size_t) {
                                  if (error) {
                                    self->close();
                                  } else {
                                    self->discard_input();
                                  }
                                });
}

void Connection::close() {
  ErrorCode ignored;
  ignored = stream_.tcp().socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_.tcp().close();
}

void Connection::end_record() {
  if (record_ != nullptr && context_.observer != nullptr) {
    context_.observer->end(record_);
  }
}

void Connection::drop(ErrorCode error) {
  end_record();
  const bool is_timeout = error == beast::error::timeout;
  context_.metrics.count(is_timeout ? ErrorKind::kTimeout : ErrorKind::kDisconnected);
  context_.logger.write(LogLevel::kDebug, "dropped", {{"error", error.message()}});
  close();
}

}  // namespace ikbo::server
