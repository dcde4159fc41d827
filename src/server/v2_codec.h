// SPDX-License-Identifier: Apache-2.0
// Open Inference Protocol v2 (REST) with the binary tensor extension, as pure functions over
// memory.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/manifest.h"
#include "server/infer_call.h"
#include "server/request_body.h"
#include "server/wire_names.h"

namespace ikbo::server {

// Bytes that decode_infer needs for the JSON besides the body, as long as it runs: for each byte
// simdjson holds 8 of its tape, 4 of indexes and 5/3 of strings.
constexpr std::size_t decoding_bytes(std::size_t json_size) { return 14 * json_size; }

// Throws RequestError(kBadRequest) that names model, tensor, requirement and value. What it returns
// has passed runtime::check_request. `request.owner` keeps the body alive; binary tensors are views
// of it wherever their alignment permits.
InferCall decode_infer(const runtime::Manifest& manifest, std::shared_ptr<const RequestBody> body);

// The body of an answer: `json`, then the bytes of `blobs` in order.
struct InferAnswer {
  std::string json;
  std::vector<runtime::Tensor> blobs;
  bool has_binary = false;  // at least one output is binary (its blob may be empty)
};

// Throws RequestError(kBadRequest) for an output whose values JSON cannot carry.
InferAnswer encode_infer(const runtime::Manifest& manifest, const InferCall& call,
                         const runtime::Response& response);

std::string encode_server_metadata(std::string_view version,
                                   const std::vector<std::string_view>& extensions);
// `versions` are those of all served packages with this model's name.
std::string encode_model_metadata(const runtime::Manifest& manifest,
                                  const std::vector<std::string>& versions);
std::string encode_model_ready(const runtime::Manifest& manifest, bool ready);
std::string encode_flag(std::string_view name, bool value);  // {"live":true}
std::string encode_error(std::string_view text);

}  // namespace ikbo::server
