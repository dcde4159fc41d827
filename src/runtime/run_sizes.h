// SPDX-License-Identifier: Apache-2.0
// The sizes of runs for which there may be CUDA graphs: a grid over users and candidates. A run
// takes the least size that holds it, and is padded to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ikbo::runtime {

struct RunSize {
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;

  friend bool operator==(const RunSize&, const RunSize&) = default;
};

class RunSizes {
 public:
  // At most `max_sizes`, at least 1, the largest of which is `limits`; an extent that is 0 stays 0.
  // Users double from 1 on; candidates grow by a quarter of a power of two from 16 on, so that a
  // run is padded by less than a quarter of its candidates. Where these are more than `max_sizes`,
  // the steps become longer, those of candidates first until they double.
  RunSizes(RunSize limits, int max_sizes);

  std::size_t size() const { return users_.size() * candidates_.size(); }
  std::size_t num_user_steps() const { return users_.size(); }
  std::size_t num_candidate_steps() const { return candidates_.size(); }
  // The size at a step of users and a step of candidates, both ascending.
  RunSize at(std::size_t user_step, std::size_t candidate_step) const {
    return {users_[user_step], candidates_[candidate_step]};
  }
  // The steps of the least size that holds a run; nothing when none does.
  struct Place {
    std::size_t user_step = 0;
    std::size_t candidate_step = 0;

    friend bool operator==(const Place&, const Place&) = default;
  };
  std::optional<Place> find(RunSize run) const;
  // The position of a place in a list of all sizes.
  std::size_t index(Place place) const {
    return place.user_step * candidates_.size() + place.candidate_step;
  }

 private:
  std::vector<std::int64_t> users_;
  std::vector<std::int64_t> candidates_;
};

}  // namespace ikbo::runtime
