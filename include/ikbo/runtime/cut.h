// SPDX-License-Identifier: Apache-2.0
// A request larger than one run: cut into parts that fit, and the parts' results joined again. Pure
// functions, no threads, no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ikbo/runtime/batch.h"

namespace ikbo::runtime {

struct RequestPart {
  Request request;
  std::int64_t first_user = 0;       // in the whole
  std::int64_t first_candidate = 0;  // in the whole, ordered by user
  bool goes_on = false;              // its first user began in the part before
};

struct CutRequest {
  std::vector<RequestPart> parts;  // at least one
  // Places in the whole of the candidates ordered by user; null: they come in that order.
  std::shared_ptr<const std::vector<std::int32_t>> order;
};

// Parts of at most `max_users` users and `max_candidates` candidates each (both at least 1), in the
// order of the users: each user comes with its candidates, and is in two parts only where the first
// of them is full. Parts point into `request` and keep its owner; candidates that do not come
// ordered by user are copied. `request` has passed check_request.
CutRequest cut(const Manifest& manifest, const Request& request, std::int64_t max_users,
               std::int64_t max_candidates);

// Bytes that `cut` may copy of `request`, and bytes of the outputs of a request of that size.
std::size_t cut_bytes(const Manifest& manifest, const Request& request);
std::size_t output_bytes(const Manifest& manifest, std::int64_t num_users,
                         std::int64_t num_candidates);

// The results of a whole request, from those of its parts.
class JoinedResponse {
 public:
  JoinedResponse(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates);

  // Copies the rows of a part to where they belong. Parts may come in any order, from several
  // threads at once.
  void add(const CutRequest& cut, std::size_t part, const Response& response);
  // After the last part, once.
  Response take();

 private:
  const Manifest& manifest_;
  Response whole_;
  std::vector<std::byte*> rows_;  // of the outputs of `whole_`
};

}  // namespace ikbo::runtime
