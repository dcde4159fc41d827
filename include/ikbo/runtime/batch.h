// SPDX-License-Identifier: Apache-2.0
// Merging requests into one run and splitting its results: pure functions, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ikbo/runtime/model.h"

namespace ikbo::runtime {

// One caller's question: u users (usually 1) and b candidates, tensors in the manifest's input
// order. When the package takes an index and the caller gave none, `tensors` holds an empty view at
// its place (TensorView::is_absent) and num_users must be 1. num_users is 0 when the package has no
// user tensors.
struct Request {
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  std::vector<TensorView> tensors;
  std::shared_ptr<const void> owner;  // keeps what `tensors` point into
};

// Results of one request in the manifest's output order.
struct Response {
  std::vector<Tensor> outputs;
};

// A run made of several requests; keeps all that `inputs` points into.
struct Batch {
  RunInputs inputs;
  std::vector<std::int64_t> candidate_offsets;  // size requests + 1
  std::vector<std::int64_t> user_offsets;       // size requests + 1
  std::vector<std::shared_ptr<const void>> storage;
};

// Throws ikbo::Error naming input, requirement and value when `request` does not fit `manifest`
// (count, dtype, shape, byte count, range, index values). Every request passes here before `batch`.
void check_request(const Manifest& manifest, const Request& request);

// Concatenates user rows and candidate rows in request order and rebases the index. A single
// request is passed through; only an absent index is made. Cost: one copy of each tensor of each
// request. Throws ikbo::Error when there is no request.
Batch batch(const Manifest& manifest, const std::vector<const Request*>& requests);

// The rows of each request, sharing the run's storage: `outputs` as Session::run returned them.
std::vector<Response> split(const Manifest& manifest, const Batch& batch,
                            const std::vector<Tensor>& outputs);

}  // namespace ikbo::runtime
