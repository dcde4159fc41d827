// SPDX-License-Identifier: Apache-2.0
// The cache behind ikbo/runtime/user_cache.h, and a model's part in it.
//
//   UserStateCache  shards by content hash, each a mutex, a map and the entries by their last use;
//                   one count of bytes over all of them, which never exceeds the limit
//   UserStates      the entries of one loaded model; its end lets go of them
//
// An entry is let go of while a run reads it: the run shares its storage. Users that several runs
// miss at once are computed by each of them, and the first of their states is kept.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "ikbo/runtime/manifest.h"
#include "ikbo/runtime/user_cache.h"
#include "runtime/content_hash.h"

namespace ikbo::runtime {

// A user as a model sees it.
struct UserId {
  std::string_view key;  // in the caller's words; may be empty
  ContentHash content;
};

class UserStateCache {
 public:
  using Clock = std::chrono::steady_clock;
  using State = std::shared_ptr<const std::byte>;

  // `now` is called by any thread.
  explicit UserStateCache(const UserCacheOptions& options,
                          std::function<Clock::time_point()> now = Clock::now);

  const HashSecret& secret() const { return secret_; }
  std::size_t used_bytes() const { return used_; }
  // What a state of that many bytes counts for.
  static std::size_t entry_bytes(std::string_view key, std::size_t state_bytes);

 private:
  friend class UserStates;

  struct Key {
    std::uint64_t model = 0;  // the number of its load
    UserId user;

    bool operator==(const Key& other) const {
      return model == other.model && user.content == other.user.content &&
             user.key == other.user.key;
    }
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const { return key.user.content.low ^ key.model; }
  };
  struct Entry {
    std::string user_key;  // what key.user.key views
    Key key;
    State state;
    std::size_t bytes = 0;
    Clock::time_point made;
    Clock::time_point used;  // last
    std::shared_ptr<UserCacheCounts> counts;
  };
  using Entries = std::list<Entry>;  // those used last come first
  struct Shard {
    std::mutex mutex;
    Entries entries;
    std::unordered_map<Key, Entries::iterator, KeyHash> by_key;
  };

  std::pair<std::uint64_t, std::shared_ptr<UserCacheCounts>> add_model(const Manifest& manifest);
  void drop_model(std::uint64_t model);
  State find(const Key& key, UserCacheCounts& counts);
  void insert(const Key& key, State state, std::size_t state_bytes,
              const std::shared_ptr<UserCacheCounts>& counts);

  Shard& shard_of(const Key& key) { return shards_[key.user.content.high % kNumShards]; }
  bool is_expired(const Entry& entry, Clock::time_point now) const {
    return time_to_live_.count() > 0 && now - entry.made >= time_to_live_;
  }
  // Takes bytes of the limit, those of other entries if need be.
  bool reserve(std::size_t bytes, Clock::time_point now);
  bool evict_oldest(Clock::time_point now);
  // With the shard's mutex: moves an entry to `gone`, which is destroyed without it.
  void remove(Shard& shard, Entries::iterator entry, Entries& gone);

  static constexpr std::size_t kNumShards = 16;

  const std::size_t max_bytes_;
  const std::chrono::milliseconds time_to_live_;
  const std::function<Clock::time_point()> now_;
  const HashSecret secret_;
  std::array<Shard, kNumShards> shards_;
  std::atomic<std::size_t> used_ = 0;
  std::mutex models_mutex_;
  // Guarded by models_mutex_:
  std::uint64_t num_models_ = 0;  // loaded so far
  std::map<std::pair<std::string, std::string>, std::weak_ptr<UserCacheCounts>> counts_;
};

// Thread-safe.
class UserStates {
 public:
  using State = UserStateCache::State;

  // Counts on with the models of this name and version that are still there.
  UserStates(std::shared_ptr<UserStateCache> cache, const Manifest& manifest);
  ~UserStates();
  UserStates(const UserStates&) = delete;
  UserStates& operator=(const UserStates&) = delete;

  // Null: there is none, or it is past its time.
  State find(const UserId& user) { return cache_->find({model_, user}, *counts_); }
  // Keeps a state of that many bytes if it can, unless one is there.
  void insert(const UserId& user, State state, std::size_t bytes) {
    cache_->insert({model_, user}, std::move(state), bytes, counts_);
  }

  const HashSecret& secret() const { return cache_->secret(); }
  std::shared_ptr<const UserCacheCounts> counts() const { return counts_; }

 private:
  const std::shared_ptr<UserStateCache> cache_;
  std::uint64_t model_ = 0;
  std::shared_ptr<UserCacheCounts> counts_;
};

}  // namespace ikbo::runtime
