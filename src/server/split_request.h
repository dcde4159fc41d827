// SPDX-License-Identifier: Apache-2.0
// A request larger than a run, as several entries of the queue whose outcomes become one.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "ikbo/runtime/model.h"
#include "server/request_queue.h"

namespace ikbo::server {

// Parts of at most that many users and candidates, to be queued in this order. `done` is called
// once: with the whole response after the last part, or with the first error of a part, after which
// the parts that still wait are as good as abandoned. Throws RequestError kOutOfMemory when
// `terms.memory` has no room for what is copied and for the joined outputs; then `done` is never
// called.
std::vector<QueueEntry> split_request(const std::shared_ptr<const runtime::Model>& model,
                                      const runtime::Request& request, InferDone done,
                                      RequestTerms terms, QueueEntry::Clock::time_point arrival,
                                      std::int64_t max_users, std::int64_t max_candidates);

}  // namespace ikbo::server
