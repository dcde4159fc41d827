// SPDX-License-Identifier: Apache-2.0
#include "runtime/user_state_cache.h"

#include <iterator>
#include <tuple>

namespace ikbo::runtime {

UserStateCache::UserStateCache(const UserCacheOptions& options,
                               std::function<Clock::time_point()> now)
    : max_bytes_(options.max_bytes),
      time_to_live_(options.time_to_live),
      now_(std::move(now)),
      secret_(make_hash_secret()) {}

std::size_t UserStateCache::entry_bytes(std::string_view key, std::size_t state_bytes) {
  // Of the list and the map, pointers and hashes; of a state, its owner and alignment; and what
  // malloc adds to each of these.
  constexpr std::size_t kOfContainers = 32 * sizeof(void*);
  return state_bytes + key.size() + sizeof(Entry) + sizeof(Key) + kOfContainers;
}

std::pair<std::uint64_t, std::shared_ptr<UserCacheCounts>> UserStateCache::add_model(
    const Manifest& manifest) {
  const std::lock_guard lock(models_mutex_);
  std::erase_if(counts_, [](const auto& known) { return known.second.expired(); });
  std::weak_ptr<UserCacheCounts>& known = counts_[{manifest.model_name, manifest.model_version}];
  std::shared_ptr<UserCacheCounts> counts = known.lock();
  if (counts == nullptr) {
    counts = std::make_shared<UserCacheCounts>();
    known = counts;
  }
  return {++num_models_, std::move(counts)};
}

void UserStateCache::drop_model(std::uint64_t model) {
  for (Shard& shard : shards_) {
    Entries gone;
    const std::lock_guard lock(shard.mutex);
    for (auto entry = shard.entries.begin(); entry != shard.entries.end();) {
      const auto next = std::next(entry);
      if (entry->key.model == model) {
        remove(shard, entry, gone);
      }
      entry = next;
    }
  }
}

UserStateCache::State UserStateCache::find(const Key& key, UserCacheCounts& counts) {
  const Clock::time_point now = now_();
  Entries gone;
  Shard& shard = shard_of(key);
  const std::lock_guard lock(shard.mutex);
  const auto found = shard.by_key.find(key);
  if (found == shard.by_key.end()) {
    counts.misses.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  const Entries::iterator entry = found->second;
  if (is_expired(*entry, now)) {
    remove(shard, entry, gone);
    counts.expirations.fetch_add(1, std::memory_order_relaxed);
    counts.misses.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  entry->used = now;
  shard.entries.splice(shard.entries.begin(), shard.entries, entry);
  counts.hits.fetch_add(1, std::memory_order_relaxed);
  return entry->state;
}

void UserStateCache::insert(const Key& key, State state, std::size_t state_bytes,
                            const std::shared_ptr<UserCacheCounts>& counts) {
  const std::size_t bytes = entry_bytes(key.user.key, state_bytes);
  const Clock::time_point now = now_();
  if (!reserve(bytes, now)) {
    return;
  }
  Entries made;
  made.push_back({std::string(key.user.key), key, std::move(state), bytes, now, now, counts});
  Entry& entry = made.front();
  entry.key.user.key = entry.user_key;
  Shard& shard = shard_of(key);
  Entries gone;
  const std::lock_guard lock(shard.mutex);
  while (!shard.entries.empty() && is_expired(shard.entries.back(), now)) {
    ++shard.entries.back().counts->expirations;
    remove(shard, std::prev(shard.entries.end()), gone);
  }
  if (!shard.by_key.emplace(entry.key, made.begin()).second) {
    used_ -= bytes;  // another run was first
    return;
  }
  shard.entries.splice(shard.entries.begin(), made);
  counts->bytes += static_cast<std::int64_t>(bytes);
  ++counts->entries;
}

bool UserStateCache::reserve(std::size_t bytes, Clock::time_point now) {
  if (bytes > max_bytes_) {
    return false;
  }
  std::size_t used = used_;
  for (;;) {
    if (used <= max_bytes_ - bytes) {
      if (used_.compare_exchange_weak(used, used + bytes)) {
        return true;
      }
      continue;
    }
    if (!evict_oldest(now)) {
      return false;  // what is used is on its way into the cache
    }
    used = used_;
  }
}

bool UserStateCache::evict_oldest(Clock::time_point now) {
  Shard* oldest = nullptr;
  Clock::time_point used = Clock::time_point::max();
  for (Shard& shard : shards_) {
    const std::lock_guard lock(shard.mutex);
    if (!shard.entries.empty() && shard.entries.back().used < used) {
      oldest = &shard;
      used = shard.entries.back().used;
    }
  }
  if (oldest == nullptr) {
    return false;
  }
  Entries gone;
  const std::lock_guard lock(oldest->mutex);
  if (!oldest->entries.empty()) {  // else others were here meanwhile
    const auto entry = std::prev(oldest->entries.end());
    UserCacheCounts& counts = *entry->counts;
    ++(is_expired(*entry, now) ? counts.expirations : counts.evictions);
    remove(*oldest, entry, gone);
  }
  return true;
}

void UserStateCache::remove(Shard& shard, Entries::iterator entry, Entries& gone) {
  shard.by_key.erase(entry->key);
  gone.splice(gone.begin(), shard.entries, entry);
  used_ -= entry->bytes;
  entry->counts->bytes -= static_cast<std::int64_t>(entry->bytes);
  --entry->counts->entries;
}

std::shared_ptr<UserStateCache> make_user_cache(const UserCacheOptions& options) {
  return std::make_shared<UserStateCache>(options);
}

UserStates::UserStates(std::shared_ptr<UserStateCache> cache, const Manifest& manifest)
    : cache_(std::move(cache)) {
  std::tie(model_, counts_) = cache_->add_model(manifest);
}

UserStates::~UserStates() { cache_->drop_model(model_); }

}  // namespace ikbo::runtime
