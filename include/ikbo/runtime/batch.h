// SPDX-License-Identifier: Apache-2.0
// Merging requests into one run and splitting its results: pure functions, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
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
  // Who the one user is, in the caller's words; empty: nobody says. In one run, requests of equal
  // key and bitwise equal user tensors share the user's row.
  std::string user_key = {};
};

// Results of one request in the manifest's output order.
struct Response {
  std::vector<Tensor> outputs;
};

// Where the rows of one request stand in a run.
struct Placement {
  std::int64_t first_user = 0;
  std::int64_t num_users = 0;
  std::int64_t first_candidate = 0;
  std::int64_t num_candidates = 0;
  bool shares_user = false;  // the row of its user came with an earlier request

  friend bool operator==(const Placement&, const Placement&) = default;
};

// A run made of several requests; keeps all that `inputs` points into.
struct Batch {
  RunInputs inputs;
  std::vector<Placement> places;  // of the requests, in their order
  std::vector<std::shared_ptr<const void>> storage;
};

// Throws ikbo::Error naming input, requirement and value when `request` does not fit `manifest`
// (count, dtype, shape, byte count, index values). Every request passes here before `batch`, where
// its sizes must be within the package's range, or before `cut`, where they may be over it.
void check_request(const Manifest& manifest, const Request& request);

// Whether two requests may share the row of their user: each has one user, with the same key, not
// empty, and the same bytes in all user tensors. Both have passed check_request.
bool have_same_user(const Manifest& manifest, const Request& a, const Request& b);

// Concatenates user rows and candidate rows in request order and rebases the index; a user whom
// requests share (have_same_user) has one row, that of the first of them. A single request is
// passed through; only an absent index is made. Cost: one copy of each tensor of each request.
// Throws ikbo::Error when there is no request, or when they are over the package's range together.
Batch batch(const Manifest& manifest, const std::vector<const Request*>& requests);

// The rows of each request, sharing the run's storage: `outputs` as Session::run returned them.
std::vector<Response> split(const Manifest& manifest, const Batch& batch,
                            const std::vector<Tensor>& outputs);

}  // namespace ikbo::runtime
