// SPDX-License-Identifier: Apache-2.0
// Open Inference Protocol v2 over gRPC: messages to requests and back, as pure functions. Knows
// protobuf and nothing of gRPC.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/manifest.h"
#include "open_inference.pb.h"
#include "server/infer_call.h"

namespace ikbo::server {

// Throws RequestError(kBadRequest) that names model, tensor, requirement and value.
// `InferCall::request.owner` keeps the message alive; raw contents, and typed ones of the tensor's
// own width, are used where they lie. Outputs come raw when the inputs did.
InferCall decode_infer(const runtime::Manifest& manifest,
                       std::shared_ptr<inference::ModelInferRequest> message);

// An answer on the wire: the bytes of each part, and after them the tensor of its output as it
// lies.
struct GrpcAnswer {
  struct Part {
    std::string bytes;
    std::optional<std::size_t> output;  // into Manifest::outputs
  };
  std::vector<Part> parts;
};

// All but the tensors of an answer with raw outputs, which follows from the request. It is made
// before the run: behind one, nothing of protobuf is in a worker's caches.
GrpcAnswer encode_raw_answer(const runtime::Manifest& manifest, const InferCall& call);
// With typed contents.
GrpcAnswer encode_typed_answer(const runtime::Manifest& manifest, const InferCall& call,
                               const runtime::Response& response);

inference::ServerMetadataResponse grpc_server_metadata(
    const std::string& version, const std::vector<std::string_view>& extensions);
// `versions` are those of all served packages with this model's name.
inference::ModelMetadataResponse grpc_model_metadata(const runtime::Manifest& manifest,
                                                     const std::vector<std::string>& versions);

}  // namespace ikbo::server
