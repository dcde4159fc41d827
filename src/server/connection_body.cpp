// SPDX-License-Identifier: Apache-2.0
// The body of a request, whole or in chunks, after its head.
#include <algorithm>
#include <boost/asio/read.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/read.hpp>
#include <cstring>
#include <new>
#include <span>
#include <utility>

#include "server/connection.h"
#include "server/request_error.h"

namespace ikbo::server {

namespace asio = boost::asio;
namespace http = boost::beast::http;

// Where the JSON ends in the body as it comes; nowhere in a packed one.
std::optional<std::size_t> Connection::received_json_size() const {
  return plan_.coding == Coding::kIdentity ? plan_.json_size : std::nullopt;
}

void Connection::read_body() {
  if (plan_.is_chunked) {
    return read_chunks();
  }
  const std::span<std::byte> bytes = body_->bytes();
  const std::size_t have = std::min(buffer_.size(), bytes.size());
  if (!hold(have)) {
    return;
  }
  if (have > 0) {
    std::memcpy(bytes.data(), buffer_.data().data(), have);
    buffer_.consume(have);
  }
  stream_.tcp().expires_after(context_.options.read_timeout);
  read_more_of_body(bytes.subspan(have));
}

// `unread` is the end of the body.
void Connection::read_more_of_body(std::span<std::byte> unread) {
  constexpr std::size_t kStep = std::size_t{1} << 20;
  if (unread.empty()) {
    return dispatch();
  }
  const std::span<std::byte> next = unread.first(std::min(unread.size(), kStep));
  if (!hold(next.size())) {
    return;
  }
  asio::async_read(stream_, asio::buffer(next.data(), next.size()),
                   [self = shared_from_this(), rest = unread.subspan(next.size())](ErrorCode error,
                                                                                   std::size_t) {
                     if (error) {
                       self->drop(error);
                     } else {
                       self->read_more_of_body(rest);
                     }
                   });
}

// Whether the memory for so many more bytes of the body was there; refuses the request if not.
bool Connection::hold(std::size_t bytes) {
  try {
    body_->hold(context_.memory.take(bytes));
    return true;
  } catch (const RequestError& refusal) {
    refuse_and_end(refusal);
    return false;
  }
}

void Connection::read_chunks() {
  stream_.tcp().expires_after(context_.options.read_timeout);
  http::async_read(
      stream_, buffer_, *parser_,
      [self = shared_from_this()](ErrorCode error, std::size_t) { self->on_chunks(error); });
}

void Connection::on_chunks(ErrorCode error) {
  if (const std::optional<RequestError> refusal = chunks_->refusal(error)) {
    return refuse_and_end(*refusal);
  }
  if (error && is_http_error(error) && error != http::error::partial_message) {
    return refuse_and_end(RequestError(
        ErrorKind::kBadRequest,
        "the body must come in chunks, as Transfer-Encoding says: " + error.message()));
  }
  if (error) {
    return drop(error);
  }
  try {
    body_ = chunks_->finish(received_json_size());
  } catch (const RequestError& refusal) {
    return reply(context_.router.error_reply(refusal));
  } catch (const std::bad_alloc&) {
    return reply(context_.router.error_reply(no_memory()));
  }
  chunks_.reset();
  dispatch();
}

}  // namespace ikbo::server
