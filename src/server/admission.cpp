// SPDX-License-Identifier: Apache-2.0
#include "server/admission.h"

#include <algorithm>

namespace ikbo::server {
namespace {

Admission::Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Admission::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

Admission::Admission(int num_workers, std::int64_t max_users, std::int64_t max_candidates)
    : cost_(max_users, max_candidates),
      free_at_(static_cast<std::size_t>(num_workers), Clock::time_point::min()) {}

void Admission::measured(std::int64_t num_users, std::int64_t num_candidates,
                         Clock::duration took) {
  if (num_candidates == 0) {
    return;
  }
  if (refusals_.has_value() && 2 * time(num_users, num_candidates) >= refusals_->least_needed) {
    refusals_.reset();
  }
  cost_.add(num_users, num_candidates, std::chrono::duration<double>(took).count());
}

void Admission::begin(std::size_t worker, std::int64_t num_users, std::int64_t num_candidates,
                      Clock::time_point now) {
  free_at_[worker] = now + time(num_users, num_candidates);
}

Admission::Clock::time_point Admission::first_free(Clock::time_point now) const {
  return std::max(now, *std::min_element(free_at_.begin(), free_at_.end()));
}

Admission::Clock::duration Admission::time(std::int64_t num_users,
                                           std::int64_t num_candidates) const {
  return duration_of(cost_.seconds(num_users, num_candidates));
}

Admission::Clock::duration Admission::careful_time(std::int64_t num_users,
                                                   std::int64_t num_candidates) const {
  return duration_of(cost_.careful_seconds(num_users, num_candidates));
}

bool Admission::is_too_late(Clock::time_point now, Clock::time_point begin, Clock::duration needed,
                            Clock::time_point deadline) {
  if (deadline == Clock::time_point::max() || begin + needed <= deadline) {
    return false;
  }
  if (!refusals_.has_value()) {
    refusals_ = Refusals{now, needed};
  }
  refusals_->least_needed = std::min(refusals_->least_needed, needed);
  return now - refusals_->first < kDoubt;
}

}  // namespace ikbo::server
