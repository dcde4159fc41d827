// SPDX-License-Identifier: Apache-2.0
#include "server/body_plan.h"

#include <charconv>
#include <system_error>

#include "server/request_error.h"

namespace ikbo::server {

BodyPlan plan_body(const BodyFields& fields, std::size_t max_bytes) {
  // Without the chunks' marks nobody knows where such a body ends and the next request begins.
  const bool is_chunked = fields.transfer_encoding.has_value();
  if (is_chunked && !is_word(*fields.transfer_encoding, "chunked")) {
    refuse(ErrorKind::kBadRequest, "Transfer-Encoding must be chunked; got ",
           *fields.transfer_encoding);
  }
  const std::optional<Coding> coding = coding_of(fields.content_encoding);
  if (!coding.has_value()) {
    refuse(ErrorKind::kUnsupportedEncoding,
           "the body must be sent as it is, or packed as gzip or deflate; got Content-Encoding: ",
           fields.content_encoding);
  }
  const std::uint64_t size = fields.content_length.value_or(0);
  if (size > max_bytes) {
    refuse(ErrorKind::kBodyTooLarge, "the body must have at most ", max_bytes,
           " bytes (--max-body-bytes); got ", size);
  }
  BodyPlan plan{is_chunked, size, *coding, std::nullopt};
  if (fields.json_size.has_value()) {
    const std::string_view text = *fields.json_size;
    const char* const first = text.data();
    const char* const last = first + text.size();
    const bool is_size_known = coding == Coding::kIdentity && !is_chunked;
    const std::uint64_t limit = is_size_known ? size : max_bytes;
    std::size_t json_size = 0;
    const auto [end, error] = std::from_chars(first, last, json_size);
    if (error != std::errc() || end != last || json_size > limit) {
      refuse(ErrorKind::kBadRequest,
             "Inference-Header-Content-Length must be a number up to Content-Length (", limit,
             "); got ", text);
    }
    plan.json_size = json_size;
  }
  return plan;
}

}  // namespace ikbo::server
