// SPDX-License-Identifier: Apache-2.0
// Runs on made-up rows before any client's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "ikbo/runtime/model.h"

namespace ikbo::server {

// One run of that size, on rows of zeros, or of the least values allowed where zero is not.
void run_made_up(runtime::Session& session, const runtime::Manifest& manifest,
                 std::int64_t num_users, std::int64_t num_candidates);

// Runs of several sizes up to that one, smallest first, and calls `measured` with each size and
// what a run of it takes once it is warm; ends early when larger runs would take longer than a
// second in all.
void measure_runs(runtime::Session& session, const runtime::Manifest& manifest,
                  std::int64_t max_users, std::int64_t max_candidates,
                  const std::function<void(std::int64_t, std::int64_t,
                                           std::chrono::steady_clock::duration)>& measured);

}  // namespace ikbo::server
