// SPDX-License-Identifier: Apache-2.0
#include "runtime/run_sizes.h"

#include <algorithm>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

// Below this many candidates kernels take as long as with this many.
constexpr std::int64_t kFewestCandidates = 16;

// How densely an axis is covered: `parts` steps for each doubling, or one for each `octaves`
// doublings; one of the two is 1.
struct Density {
  int parts = 1;
  int octaves = 1;

  Density sparser() const { return parts > 1 ? Density{parts / 2, 1} : Density{1, 2 * octaves}; }
};

// From this many doublings on, an axis has its last step alone.
constexpr int kAllOctaves = 32;

// From `first` on, `limit` the last.
std::vector<std::int64_t> make_steps(std::int64_t first, std::int64_t limit, Density density) {
  std::vector<std::int64_t> steps;
  for (std::int64_t octave = density.octaves < kAllOctaves ? first : limit; octave < limit;
       octave <<= density.octaves) {
    for (int part = 0; part < density.parts; ++part) {
      const std::int64_t step = octave + octave * part / density.parts;
      if (step < limit) {
        steps.push_back(step);
      }
    }
  }
  steps.push_back(limit);
  return steps;
}

std::optional<std::size_t> first_that_holds(const std::vector<std::int64_t>& steps,
                                            std::int64_t count) {
  const auto found = std::lower_bound(steps.begin(), steps.end(), count);
  if (found == steps.end()) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(found - steps.begin());
}

}  // namespace

RunSizes::RunSizes(RunSize limits, int max_sizes) {
  IKBO_CHECK(max_sizes >= 1, "RunSizes: max_sizes must be at least 1; got ", max_sizes);
  Density of_users;
  Density of_candidates{4, 1};
  for (;;) {
    users_ = make_steps(1, limits.num_users, of_users);
    candidates_ = make_steps(kFewestCandidates, limits.num_candidates, of_candidates);
    if (size() <= static_cast<std::size_t>(max_sizes)) {
      return;
    }
    // One step is left of an axis in the end, and cannot be made fewer.
    const bool are_candidates_dense = of_candidates.parts > 1 || users_.size() == 1;
    if (are_candidates_dense ||
        (candidates_.size() > 1 && of_candidates.octaves <= of_users.octaves)) {
      of_candidates = of_candidates.sparser();
    } else {
      of_users = of_users.sparser();
    }
  }
}

std::optional<RunSizes::Place> RunSizes::find(RunSize run) const {
  const auto user_step = first_that_holds(users_, run.num_users);
  const auto candidate_step = first_that_holds(candidates_, run.num_candidates);
  if (!user_step.has_value() || !candidate_step.has_value()) {
    return std::nullopt;
  }
  return Place{*user_step, *candidate_step};
}

}  // namespace ikbo::runtime
