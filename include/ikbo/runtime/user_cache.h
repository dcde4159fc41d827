// SPDX-License-Identifier: Apache-2.0
// The cache of user states: what the user stage of a package computed of a user, kept for the next
// request of that user. One cache serves all models of a process (ModelOptions::user_cache).
//
// An entry is found by the loaded model, the user's key (RunInputs::user_keys; it may be empty) and
// a hash of the user's rows in all user inputs: a changed input, another key and a model that was
// loaded again find nothing. Entries are the bytes that the user stage wrote.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace ikbo::runtime {

class UserStateCache;

struct UserCacheOptions {
  // Of all entries, with what the cache needs to keep them. What does not fit in it as a whole is
  // not kept; for what does, those that were not used for longest are let go.
  std::size_t max_bytes = 0;
  std::chrono::milliseconds time_to_live{600'000};  // of an entry, from its making; 0: no limit
};

// Of the entries of one name and version of a model. Any thread may read them.
struct UserCacheCounts {
  std::atomic<std::uint64_t> hits = 0;
  std::atomic<std::uint64_t> misses = 0;
  std::atomic<std::uint64_t> evictions = 0;    // let go to make room
  std::atomic<std::uint64_t> expirations = 0;  // let go at the end of their time
  std::atomic<std::int64_t> bytes = 0;         // now
  std::atomic<std::int64_t> entries = 0;       // now

  // Hits among all look-ups; 0 before the first.
  double hit_rate() const {
    const auto found = static_cast<double>(hits.load(std::memory_order_relaxed));
    const double all = found + static_cast<double>(misses.load(std::memory_order_relaxed));
    return all > 0 ? found / all : 0;
  }
};

std::shared_ptr<UserStateCache> make_user_cache(const UserCacheOptions& options);

}  // namespace ikbo::runtime
