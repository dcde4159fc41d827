// SPDX-License-Identifier: Apache-2.0
// Merging requests into one run and splitting its results: pure functions, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ikbo/runtime/model.h"

namespace ikbo::runtime {

// One caller's question: u users (usually 1) and b candidates, tensors in the manifest's input order.
// When the package takes an index and the caller gave none, `tensors` holds an empty view at its
// place (data == nullptr, shape empty) and num_users must be 1.
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

// A run made of several requests; owns the concatenated tensors.
struct Batch {
  RunInputs inputs;
  std::vector<std::int64_t> candidate_offsets;  // size requests + 1
  std::vector<std::int64_t> user_offsets;       // size requests + 1
  std::vector<std::shared_ptr<void>> storage;
};

// Throws ikbo::Error naming input, requirement and value when `request` does not fit `manifest`
// (count, dtype, shape, byte count, range, index values). Every request passes here before `batch`.
void check_request(const Manifest& manifest, const Request& request);

// Concatenates user rows and candidate rows in request order and rebases the index. A single request
// is passed through without a copy where its index is given.
Batch batch(const Manifest& manifest, const std::vector<const Request*>& requests);

// The rows of each request, sharing the run's storage.
std::vector<Response> split(const Manifest& manifest, const Batch& batch,
                            const std::vector<Tensor>& outputs);

}  // namespace ikbo::runtime
