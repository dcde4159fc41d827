// SPDX-License-Identifier: Apache-2.0
// Whether a request can still be answered in time, from what runs were measured to take.
//
// An estimate that is too high would refuse for ever, since what is refused is not measured: when a
// size has been refused for kDoubt without a run of about that size, the next request is let
// through and its run tells.
//
// Nothing here reads a clock or takes a lock: the batcher does.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/run_cost.h"

namespace ikbo::server {

class Admission {
 public:
  using Clock = std::chrono::steady_clock;

  Admission(int num_workers, std::int64_t max_users, std::int64_t max_candidates);

  const RunCost& cost() const { return cost_; }
  std::size_t num_workers() const { return free_at_.size(); }
  // What a run was measured to take. Runs without candidates tell nothing.
  void measured(std::int64_t num_users, std::int64_t num_candidates, Clock::duration time);

  // A worker begins a run of that size, and ends it.
  void begin(std::size_t worker, std::int64_t num_users, std::int64_t num_candidates,
             Clock::time_point now);
  void end(std::size_t worker) { free_at_[worker] = Clock::time_point::min(); }
  // When the first of the workers is, or should be, free.
  Clock::time_point first_free(Clock::time_point now) const;

  // The time a run of that size is expected to take, without and with a margin.
  Clock::duration time(std::int64_t num_users, std::int64_t num_candidates) const;
  Clock::duration careful_time(std::int64_t num_users, std::int64_t num_candidates) const;

  // Whether work of `needed` that can begin at `begin` must be refused as too late for `deadline`.
  bool is_too_late(Clock::time_point now, Clock::time_point begin, Clock::duration needed,
                   Clock::time_point deadline);

 private:
  static constexpr std::chrono::seconds kDoubt{1};
  // Refusals since the last run of about that size: expected to take half as long at least.
  struct Refusals {
    Clock::time_point first;
    Clock::duration least_needed;
  };

  RunCost cost_;
  std::vector<Clock::time_point> free_at_;  // by worker
  std::optional<Refusals> refusals_;
};

}  // namespace ikbo::server
