// SPDX-License-Identifier: Apache-2.0
// What a request's head says of its body, before any of it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "server/http_coding.h"

namespace ikbo::server {

struct BodyFields {
  std::optional<std::string_view> transfer_encoding = std::nullopt;
  std::optional<std::uint64_t> content_length = std::nullopt;
  std::string_view content_encoding = {};
  std::optional<std::string_view> json_size = std::nullopt;  // Inference-Header-Content-Length
};

struct BodyPlan {
  bool is_chunked = false;
  std::size_t size = 0;  // on the wire; 0 for chunks, which say it when they come
  Coding coding = Coding::kIdentity;
  // Of the body once unpacked; none: the whole of it. At most `size` when that is known to be the
  // same.
  std::optional<std::size_t> json_size = std::nullopt;
};

// Throws RequestError: a body of an unknown coding, one over `max_bytes`, a JSON header longer than
// the body.
BodyPlan plan_body(const BodyFields& fields, std::size_t max_bytes);

}  // namespace ikbo::server
