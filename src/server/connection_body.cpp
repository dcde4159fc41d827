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
