// SPDX-License-Identifier: Apache-2.0
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "fixtures.h"
#include "runtime/storage.h"
#include "runtime/user_state_cache.h"

namespace ikbo::runtime::testing {
namespace {

using std::chrono::milliseconds;
using State = UserStateCache::State;

constexpr std::size_t kStateBytes = 1000;

UserId user(std::uint64_t number, std::string_view key = "") {
  return {key, {number * 0x9E3779B97F4A7C15ULL, number}};
}

// `bytes` bytes of that value.
State state_of(unsigned char value, std::size_t bytes = kStateBytes) {
  const std::shared_ptr<std::byte[]> block(new std::byte[bytes]);
  std::fill_n(block.get(), bytes, std::byte{value});
  return {block, block.get()};
}

bool is_filled(const State& state, unsigned char value, std::size_t bytes = kStateBytes) {
  return std::all_of(state.get(), state.get() + bytes,
                     [&](std::byte byte) { return byte == std::byte{value}; });
}

Manifest model(const std::string& name, const std::string& version = "1") {
  Manifest named = manifest();
  named.model_name = name;
  named.model_version = version;
  return named;
}

class UserCache : public ::testing::Test {
 protected:
  // A cache with room for that many entries without a key; its clock is `now_`.
  void make(std::size_t num_entries, milliseconds time_to_live = milliseconds(0)) {
    max_bytes_ = num_entries * UserStateCache::entry_bytes("", kStateBytes);
    cache_ = std::make_shared<UserStateCache>(UserCacheOptions{max_bytes_, time_to_live},
                                              [this] { return now_; });
    users_.emplace(cache_, model("a"));
  }

  void insert(UserStates& users, std::uint64_t number) {
    now_ += milliseconds(1);
    users.insert(user(number), state_of(static_cast<unsigned char>(number)), kStateBytes);
  }
  bool finds(UserStates& users, std::uint64_t number) {
    now_ += milliseconds(1);
    const State state = users.find(user(number));
    EXPECT_TRUE(state == nullptr || is_filled(state, static_cast<unsigned char>(number)));
    return state != nullptr;
  }

  UserStateCache::Clock::time_point now_{};
  std::size_t max_bytes_ = 0;
  std::shared_ptr<UserStateCache> cache_;
  std::optional<UserStates> users_;
};

TEST_F(UserCache, FindsTheStateThatItWasGiven) {
  make(4);
  EXPECT_EQ(users_->find(user(1)), nullptr);
  const State state = state_of(1);
  users_->insert(user(1), state, kStateBytes);
  EXPECT_EQ(users_->find(user(1)), state);
  EXPECT_EQ(users_->counts()->hits, 1U);
  EXPECT_EQ(users_->counts()->misses, 1U);
  EXPECT_EQ(users_->counts()->hit_rate(), 0.5);
  EXPECT_EQ(users_->counts()->entries, 1);
  EXPECT_EQ(cache_->used_bytes(), UserStateCache::entry_bytes("", kStateBytes));
  EXPECT_EQ(users_->counts()->bytes, static_cast<std::int64_t>(cache_->used_bytes()));
}

TEST_F(UserCache, TellsKeysContentsAndLoadsApart) {
  make(8);
  const UserId ann{"ann", {7, 1}};
  users_->insert(ann, state_of(1), kStateBytes);
  EXPECT_NE(users_->find({std::string("ann"), {7, 1}}), nullptr);
  EXPECT_EQ(users_->find({"bob", {7, 1}}), nullptr);
  EXPECT_EQ(users_->find({"", {7, 1}}), nullptr);
  EXPECT_EQ(users_->find({"ann", {7, 2}}), nullptr);
  EXPECT_EQ(users_->find({"ann", {8, 1}}), nullptr);
  UserStates loaded_again(cache_, model("a"));
  EXPECT_EQ(loaded_again.find(ann), nullptr);
}

TEST_F(UserCache, KeepsItsOwnCopyOfTheKey) {
  make(4);
  std::string key = "ann";
  users_->insert({key, {7, 1}}, state_of(1), kStateBytes);
  key = "bob";
  EXPECT_NE(users_->find({"ann", {7, 1}}), nullptr);
  EXPECT_EQ(users_->find({key, {7, 1}}), nullptr);
}

TEST_F(UserCache, KeepsTheFirstOfTwoStates) {
  make(4);
  const State first = state_of(1);
  users_->insert(user(1), first, kStateBytes);
  users_->insert(user(1), state_of(1), kStateBytes);
  EXPECT_EQ(users_->find(user(1)), first);
  EXPECT_EQ(users_->counts()->entries, 1);
  EXPECT_EQ(cache_->used_bytes(), UserStateCache::entry_bytes("", kStateBytes));
}

TEST_F(UserCache, LetsGoOfWhatWasNotUsedForLongest) {
  make(3);
  for (const std::uint64_t number : {1, 2, 3}) {
    insert(*users_, number);
  }
  EXPECT_TRUE(finds(*users_, 1));
  insert(*users_, 4);
  EXPECT_FALSE(finds(*users_, 2));
  EXPECT_TRUE(finds(*users_, 1) && finds(*users_, 3) && finds(*users_, 4));
  EXPECT_EQ(users_->counts()->evictions, 1U);
  EXPECT_EQ(users_->counts()->entries, 3);
  EXPECT_EQ(cache_->used_bytes(), max_bytes_);
}

TEST_F(UserCache, NeverKeepsWhatIsOverTheLimit) {
  make(2);
  insert(*users_, 1);
  users_->insert(user(2), state_of(2, 2 * kStateBytes + 500), 2 * kStateBytes + 500);
  EXPECT_EQ(users_->find(user(2)), nullptr);
  EXPECT_TRUE(finds(*users_, 1)) << "nothing makes room for what does not fit";
  const std::string long_key(3 * kStateBytes, 'k');
  users_->insert(user(3, long_key), state_of(3), kStateBytes);
  EXPECT_EQ(users_->find(user(3, long_key)), nullptr) << "keys count";
}

TEST_F(UserCache, CountsNoLessThanItTakes) {
  const auto allocated = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  constexpr std::size_t kSmall = 64;
  for (const char* key : {"", "a key that is too long to lie within a string"}) {
    make(1'000'000);
    const std::size_t before = allocated();
    for (std::uint64_t i = 0; i < 10'000; ++i) {
      users_->insert(user(i, key), allocate_bytes(kSmall), kSmall);
    }
    EXPECT_LE(allocated() - before, cache_->used_bytes()) << key;
  }
}

TEST_F(UserCache, MakesRoomForALargeEntryWithSeveral) {
  make(4);
  for (const std::uint64_t number : {1, 2, 3, 4}) {
    insert(*users_, number);
  }
  now_ += milliseconds(1);
  users_->insert(user(5), state_of(5, 2 * kStateBytes), 2 * kStateBytes);
  EXPECT_NE(users_->find(user(5)), nullptr);
  EXPECT_FALSE(finds(*users_, 1) || finds(*users_, 2));
  EXPECT_TRUE(finds(*users_, 3) && finds(*users_, 4));
  EXPECT_LE(cache_->used_bytes(), max_bytes_);
}

TEST_F(UserCache, ForgetsAtTheEndOfAnEntrysTime) {
  make(4, milliseconds(100));
  insert(*users_, 1);
  now_ += milliseconds(50);
  EXPECT_TRUE(finds(*users_, 1));
  now_ += milliseconds(47);
  EXPECT_TRUE(finds(*users_, 1)) << "use does not count, but 99 ms are less than 100";
  EXPECT_FALSE(finds(*users_, 1));
  EXPECT_EQ(users_->counts()->expirations, 1U);
  EXPECT_EQ(users_->counts()->evictions, 0U);
  EXPECT_EQ(users_->counts()->hits, 2U);
  EXPECT_EQ(users_->counts()->misses, 1U);
  EXPECT_EQ(cache_->used_bytes(), 0U);
}

TEST_F(UserCache, CountsWhatIsOverItsTimeAsExpiredWhenRoomIsMade) {
  make(1, milliseconds(100));
  insert(*users_, 1);
  now_ += milliseconds(100);
  insert(*users_, 2);
  EXPECT_EQ(users_->counts()->expirations, 1U);
  EXPECT_EQ(users_->counts()->evictions, 0U);
  EXPECT_TRUE(finds(*users_, 2));
}

TEST_F(UserCache, LeavesAStateToTheRunThatReadsIt) {
  make(1);
  insert(*users_, 1);
  const State read = users_->find(user(1));
  insert(*users_, 2);
  EXPECT_EQ(users_->find(user(1)), nullptr);
  EXPECT_TRUE(is_filled(read, 1));
  users_.reset();
  EXPECT_TRUE(is_filled(read, 1));
}

TEST_F(UserCache, SharesTheLimitBetweenModels) {
  make(2);
  UserStates others(cache_, model("b"));
  insert(*users_, 1);
  insert(others, 1);
  insert(others, 2);
  EXPECT_FALSE(finds(*users_, 1));
  EXPECT_TRUE(finds(others, 1) && finds(others, 2));
  EXPECT_EQ(users_->counts()->evictions, 1U);
  EXPECT_EQ(users_->counts()->bytes, 0);
  EXPECT_EQ(others.counts()->evictions, 0U);
  EXPECT_EQ(others.counts()->entries, 2);
}

TEST_F(UserCache, FreesTheEntriesOfAModelThatEnds) {
  make(32);
  std::optional<UserStates> ends(std::in_place, cache_, model("b"));
  for (std::uint64_t number = 0; number < 10; ++number) {
    insert(*users_, number);
    insert(*ends, number);
  }
  ends.reset();
  EXPECT_EQ(cache_->used_bytes(), 10 * UserStateCache::entry_bytes("", kStateBytes));
  for (std::uint64_t number = 0; number < 10; ++number) {
    EXPECT_TRUE(finds(*users_, number));
  }
}

TEST_F(UserCache, CountsOnWhenAModelIsLoadedAgain) {
  make(8);
  insert(*users_, 1);
  EXPECT_TRUE(finds(*users_, 1));
  std::optional<UserStates> loaded_again(std::in_place, cache_, model("a"));
  UserStates next_version(cache_, model("a", "2"));
  EXPECT_EQ(loaded_again->counts(), users_->counts());
  EXPECT_NE(next_version.counts(), users_->counts());
  insert(*loaded_again, 1);
  EXPECT_EQ(loaded_again->counts()->entries, 2);
  users_.reset();
  EXPECT_EQ(loaded_again->counts()->entries, 1);
  EXPECT_EQ(loaded_again->counts()->hits, 1U);
  loaded_again.reset();
  EXPECT_EQ(UserStates(cache_, model("a")).counts()->hits, 0U) << "nobody counted any more";
}

TEST(UserCacheThreads, NeverMixUsersAndStayWithinTheLimit) {
  constexpr int kThreads = 4;
  constexpr int kUsers = 61;
  constexpr std::size_t kFits = 20;
  const std::size_t max_bytes = kFits * UserStateCache::entry_bytes("", kStateBytes);
  const auto cache = std::make_shared<UserStateCache>(UserCacheOptions{max_bytes, milliseconds(2)});
  UserStates shared(cache, model("a"));
  std::atomic<bool> is_within = true;
  std::atomic<bool> is_right = true;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 20; ++round) {
        UserStates own(cache, model("own", std::to_string(thread)));
        for (int i = 0; i < 200; ++i) {
          UserStates& users = i % 4 == 0 ? own : shared;
          // Squares come again after more and more others, so that some are found and some are
          // gone.
          const auto number = static_cast<std::uint64_t>(i * i % kUsers);
          const auto value = static_cast<unsigned char>(number + (i % 4 == 0 ? 100 : 0));
          const State state = users.find(user(number));
          if (state == nullptr) {
            users.insert(user(number), state_of(value), kStateBytes);
          } else if (!is_filled(state, value)) {
            is_right = false;
          }
          is_within = is_within && cache->used_bytes() <= max_bytes;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(is_right);
  EXPECT_TRUE(is_within);
  const UserCacheCounts& counts = *shared.counts();
  EXPECT_EQ(counts.hits + counts.misses, kThreads * 20U * 150U);
  EXPECT_GT(counts.hits, 0U);
  EXPECT_GT(counts.evictions, 0U);
  EXPECT_EQ(counts.bytes, static_cast<std::int64_t>(cache->used_bytes()));
  EXPECT_EQ(static_cast<std::size_t>(counts.entries) * UserStateCache::entry_bytes("", kStateBytes),
            cache->used_bytes());
}

TEST(ContentHash, IsOfTheBytesInTheirOrder) {
  const HashSecret secret = make_hash_secret();
  ContentHasher hasher(secret);
  const auto hash = [&](const std::vector<std::string>& parts) {
    hasher.begin();
    for (const std::string& part : parts) {
      hasher.add(part.data(), part.size());
    }
    return hasher.finish();
  };
  std::string text(1000, 'x');
  const ContentHash whole = hash({text});
  EXPECT_EQ(hash({text.substr(0, 300), "", text.substr(300)}), whole);
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = 'y';
    EXPECT_FALSE(hash({changed}) == whole) << "byte " << at;
  }
  EXPECT_FALSE(hash({text, "x"}) == whole);
  const HashSecret other = make_hash_secret();
  ContentHasher hasher_elsewhere(other);
  hasher_elsewhere.begin();
  hasher_elsewhere.add(text.data(), text.size());
  EXPECT_FALSE(hasher_elsewhere.finish() == whole) << "two processes have two secrets";
}

}  // namespace
}  // namespace ikbo::runtime::testing
