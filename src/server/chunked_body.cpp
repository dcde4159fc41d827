// SPDX-License-Identifier: Apache-2.0
#include "server/chunked_body.h"

#include <boost/beast/http/error.hpp>
#include <cstring>
#include <new>

namespace ikbo::server {

ChunkedBody::ChunkedBody(std::size_t max_bytes, MemoryBudget& memory)
    : max_bytes_(max_bytes),
      memory_(memory),
      on_header_([this](std::uint64_t bytes, Text, ErrorCode& error) { expect(bytes, error); }),
      on_body_([this](std::uint64_t, Text bytes, ErrorCode& error) {
        return add({bytes.data(), bytes.size()}, error);
      }) {}

RequestError ChunkedBody::too_large() const {
  return RequestError(ErrorKind::kBodyTooLarge,
                      "the body must have at most " + std::to_string(max_bytes_) +
                          " bytes (--max-body-bytes); got more, in chunks");
}

// Beast has a limit of its own, on what 64 bits can count.
std::optional<RequestError> ChunkedBody::refusal(const ErrorCode& error) const {
  const bool is_limit = error == boost::beast::http::error::body_limit;
  return refusal_.has_value() || !is_limit ? refusal_ : too_large();
}

void ChunkedBody::refuse_with(const RequestError& refusal, ErrorCode& error) {
  refusal_ = refusal;
  error = boost::beast::http::error::body_limit;
}

// Nothing may be thrown through the parser. There must be room for a chunk that is announced, which
// is held as its bytes come.
void ChunkedBody::expect(std::uint64_t bytes, ErrorCode& error) {
  if (bytes > max_bytes_ - expected_) {
    return refuse_with(too_large(), error);
  }
  try {
    static_cast<void>(memory_.take(bytes));
    expected_ += bytes;
  } catch (const RequestError& refusal) {
    refuse_with(refusal, error);
  }
}

std::size_t ChunkedBody::add(std::string_view bytes, ErrorCode& error) {
  try {
    lease_.add(memory_.take(bytes.size()));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  } catch (const RequestError& refusal) {
    refuse_with(refusal, error);
  } catch (const std::bad_alloc&) {
    refuse_with(RequestError(ErrorKind::kOutOfMemory,
                             "the server has no memory for the request's body now"),
                error);
  }
  return bytes.size();
}

std::shared_ptr<RequestBody> ChunkedBody::finish(std::optional<std::size_t> json_size) {
  const std::size_t size = bytes_.size();
  if (json_size.value_or(0) > size) {
    refuse(ErrorKind::kBadRequest,
           "Inference-Header-Content-Length must be at most the length of the body (", size,
           "); got ", *json_size);
  }
  auto body = std::make_shared<RequestBody>(size, json_size.value_or(size), memory_.take(size));
  if (size > 0) {
    std::memcpy(body->bytes().data(), bytes_.data(), size);
  }
  return body;
}

}  // namespace ikbo::server
