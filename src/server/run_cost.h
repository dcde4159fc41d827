// SPDX-License-Identifier: Apache-2.0
// How long a run takes, by its size: seconds = fixed + per_user * users + per_candidate *
// candidates, no part of it negative, fitted to the runs measured so far. Later runs count more,
// an error counts less where the run is long, and once a few runs are known a single slow one
// counts at most as twice what was expected. Pure arithmetic: no clock, no threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ikbo::server {

class RunCost {
 public:
  // Sizes of the largest run: what users and candidates are measured in.
  RunCost(std::int64_t max_users, std::int64_t max_candidates);

  void add(std::int64_t num_users, std::int64_t num_candidates, double seconds);

  // What a run takes; 0 as long as nothing is known.
  double seconds(std::int64_t num_users, std::int64_t num_candidates) const;
  // The same with twice on top what runs were lately off by, and a fifth at least.
  double careful_seconds(std::int64_t num_users, std::int64_t num_candidates) const;
  // What that many rows add to a run.
  double seconds_of_rows(std::int64_t num_users, std::int64_t num_candidates) const;
  // Of rows that wait for so many workers and would add that much to one run: how much of it the
  // next run should have at least. Runs of equal parts answer soonest on average with
  // sqrt(fixed * waiting / workers) in each: in larger ones the first requests wait for the last
  // ones' rows, in smaller ones the last requests wait for many a fixed part. Never less than a
  // share of it, so that a backlog is merged, and what that takes is measured, even where merging
  // seemed to save nothing.
  double rows_of_next_run(double waiting, std::size_t num_workers) const;

 private:
  using Vector = std::array<double, 3>;

  Vector features(std::int64_t num_users, std::int64_t num_candidates) const;
  void fit();

  double user_scale_;
  double candidate_scale_;
  std::array<Vector, 3> squares_{};  // sums over the runs of weight * feature * feature
  Vector products_{};                // and of weight * feature * seconds
  Vector parts_{};                   // fixed, and of the users and candidates of the largest run
  double error_ = 0;                 // relative, of late
  int num_runs_ = 0;                 // counted up to kSettled
};

}  // namespace ikbo::server
