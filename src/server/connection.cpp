// SPDX-License-Identifier: Apache-2.0
#include "server/connection.h"

#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/bind_handler.hpp>
#include <boost/beast/http/read.hpp>
#include <limits>
#include <new>
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

// All fields of that name as one, as HTTP has it; nothing when there is none.
template <typename Fields>
std::optional<std::string> join_fields(const Fields& fields, http::field name) {
  std::optional<std::string> joined;
  const auto [first, last] = fields.equal_range(name);
  for (auto it = first; it != last; ++it) {
    joined = (joined.has_value() ? *joined + ", " : "") + std::string(view(it->value()));
  }
  return joined;
}

}  // namespace

bool is_http_error(const boost::system::error_code& error) {
  return error.category() == http::make_error_code(http::error::bad_method).category();
}

RequestError no_memory() {
  return RequestError(ErrorKind::kOutOfMemory,
                      "the server has no memory for the request's body now");
}

Connection::Connection(asio::ip::tcp::socket socket, ConnectionContext& context)
    : context_(context), end_{context, this}, stream_(std::move(socket), context.tls) {
  ErrorCode ignored;
  ignored = stream_.tcp().socket().non_blocking(true, ignored);
  ++context_.metrics.connections;
}

Connection::~Connection() { --context_.metrics.connections; }

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
  serializer_.reset();
  response_.reset();
  body_.reset();
  chunks_.reset();
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
  head_bytes_ = 0;
  stream_.tcp().expires_after(context_.options.read_timeout);
  read_more_of_head();
}

// NOTE: the parser's own limit is for one line, however many there are.
void Connection::read_more_of_head() {
  http::async_read_some(stream_, buffer_, *parser_,
                        [self = shared_from_this()](ErrorCode error, std::size_t bytes) {
                          self->head_bytes_ += bytes;
                          if (!error && self->head_bytes_ > kMaxHeadBytes) {
                            error = http::error::header_limit;
                          }
                          if (error || self->parser_->is_header_done()) {
                            self->on_head(error);
                          } else {
                            self->read_more_of_head();
                          }
                        });
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
  context_.router.authorize(view(head.target()), view(head[http::field::authorization]));
  BodyFields fields;
  const std::optional<std::string> transfer_encoding =
      join_fields(head, http::field::transfer_encoding);
  if (transfer_encoding.has_value()) {
    fields.transfer_encoding = *transfer_encoding;
  }
  if (const auto length = parser_->content_length()) {
    fields.content_length = *length;
  }
  fields.content_encoding = view(head[http::field::content_encoding]);
  if (const auto field = head.find(kJsonSizeField); field != head.end()) {
    fields.json_size = view(field->value());
  }
  plan_ = plan_body(fields, context_.options.max_body_bytes);
  if (plan_.is_chunked) {
    chunks_.emplace(context_.options.max_body_bytes, context_.memory);
    chunks_->collect_from(*parser_);
  } else {
    // There must be room for all of it, which is held as the bytes come: whoever sends none holds
    // none.
    static_cast<void>(context_.memory.take(plan_.size));
    body_ = std::make_shared<RequestBody>(plan_.size, received_json_size().value_or(plan_.size));
  }
  const bool has_all = plan_.is_chunked ? buffer_.size() > 0 : buffer_.size() >= plan_.size;
  const bool is_1_0 = head.version() < 11;  // knows no 100
  if (beast::iequals(head[http::field::expect], "100-continue") && !has_all && !is_1_0) {
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

void Connection::dispatch() {
  const auto& head = parser_->get();
  begin_record();
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
  request.record = record_;
  context_.router.handle(std::move(request), [self = shared_from_this()](PendingReply pending) {
    self->take(std::move(pending));
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
