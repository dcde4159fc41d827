// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "fixtures.h"
#include "server/request_queue.h"

namespace ikbo::server {
namespace {

using std::chrono::milliseconds;
using testing::make_request;
using Clock = RequestQueue::Clock;

constexpr Clock::time_point kStart = Clock::time_point{} + std::chrono::hours(1);

// A queue in front of a model of which a run takes 1 ms for each candidate.
class RequestQueueTest : public ::testing::Test {
 protected:
  RequestQueueTest() { runs_take(milliseconds(0)); }

  // And that besides.
  void runs_take(milliseconds fixed, int num_workers = 1) {
    admission_ = Admission(num_workers, 4, 16);
    for (int i = 0; i < 4; ++i) {
      for (const auto& [users, candidates] : {std::pair{1, 1}, {4, 16}, {1, 16}, {4, 4}}) {
        admission_.measured(users, candidates, fixed + milliseconds(candidates));
      }
    }
  }

  void add(runtime::Request request, milliseconds deadline = milliseconds(-1)) {
    QueueEntry entry{std::move(request), [](const InferOutcome&) {}, {}, kStart};
    if (deadline >= milliseconds(0)) {
      entry.terms.deadline = kStart + deadline;
    }
    queue_.add(std::move(entry));
  }

  static runtime::Request keyed(int candidates, int seed, const char* key) {
    runtime::Request request = make_request(1, candidates, seed);
    request.user_key = key;
    return request;
  }

  std::vector<std::int64_t> candidates_of_all() {
    std::vector<std::int64_t> candidates;
    while (!queue_.is_empty()) {
      candidates.push_back(queue_.take_front(1)[0].request.num_candidates);
    }
    return candidates;
  }

  const runtime::Manifest manifest_ = testing::manifest();
  Admission admission_{1, 4, 16};
  RequestQueue queue_{manifest_, admission_, 4, 16};
};

TEST_F(RequestQueueTest, TakesThePrefixThatFits) {
  runs_take(milliseconds(100));
  add(make_request(1, 6, 1));
  add(make_request(2, 8, 2));
  add(make_request(1, 3, 3));
  const NextRun run = queue_.next_run(kStart);
  EXPECT_EQ(run.size, 2u);
  EXPECT_TRUE(run.is_full);
  EXPECT_EQ(run.num_users, 3);
  EXPECT_EQ(run.num_candidates, 14);
  EXPECT_EQ(run.begin_by, Clock::time_point::max());
  EXPECT_EQ(queue_.take_front(run.size).size(), 2u);
  EXPECT_FALSE(queue_.next_run(kStart).is_full);
}

TEST_F(RequestQueueTest, ARunIsNotMadeSoLargeThatADeadlineIsMissed) {
  runs_take(milliseconds(8));
  add(make_request(1, 4, 1), milliseconds(22));
  add(make_request(1, 5, 2));
  add(make_request(1, 3, 3));
  const NextRun run = queue_.next_run(kStart);
  EXPECT_EQ(run.size, 2u);  // 17 ms and a fifth end in time, 20 ms and a fifth would not
  EXPECT_TRUE(run.is_full);
  EXPECT_NEAR(std::chrono::duration<double>(run.begin_by - kStart).count(), 0.0016, 0.0008);
  EXPECT_EQ(queue_.next_run(kStart + milliseconds(5)).size, 1u);
}

TEST_F(RequestQueueTest, TheDeadlineOfALaterRequestCounts) {
  runs_take(milliseconds(8));
  add(make_request(1, 4, 1), milliseconds(16));
  add(make_request(1, 5, 2), milliseconds(17));
  EXPECT_EQ(queue_.next_run(kStart).size, 1u);
}

TEST_F(RequestQueueTest, WhatCannotBeInTimeIsUseless) {
  add(make_request(1, 8, 1), milliseconds(5));
  add(make_request(1, 3, 2), milliseconds(5));
  const std::vector<RefusedEntry> refused = queue_.take_useless(kStart);
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].entry.request.num_candidates, 8);
  EXPECT_EQ(refused[0].error.kind(), ErrorKind::kDeadlineExceeded);
  testing::expect_contains(refused[0].error.what(), "must leave time for its run, about ");
  testing::expect_contains(refused[0].error.what(), "5000 us are left after 0 us in the queue");
  EXPECT_EQ(queue_.num_requests(), 1u);
  const std::vector<RefusedEntry> late = queue_.take_useless(kStart + milliseconds(5));
  ASSERT_EQ(late.size(), 1u);
  testing::expect_contains(late[0].error.what(), "it passed after 5000 us in the queue");
  EXPECT_TRUE(queue_.is_empty());
}

TEST_F(RequestQueueTest, TakingTheUselessKeepsTheOrder) {
  for (int i = 1; i <= 8; ++i) {
    add(make_request(1, i, i), i % 2 == 0 ? milliseconds(100 + i) : milliseconds(0));
  }
  EXPECT_EQ(queue_.take_useless(kStart).size(), 4u);
  EXPECT_EQ(candidates_of_all(), (std::vector<std::int64_t>{2, 4, 6, 8}));
}

TEST_F(RequestQueueTest, ARunIsNoLargerThanPays) {
  runs_take(milliseconds(3));
  for (int i = 0; i < 4; ++i) {
    add(make_request(1, 4, i));
  }
  const NextRun run = queue_.next_run(kStart);
  EXPECT_EQ(run.size, 2u);  // 4 ms of rows are less than the root of 3 * 16, 8 ms are more
  EXPECT_TRUE(run.is_full);
  queue_.take_front(run.size);
  const NextRun rest = queue_.next_run(kStart);
  EXPECT_EQ(rest.size, 2u);
  EXPECT_FALSE(rest.is_full);
}

TEST_F(RequestQueueTest, WhatWaitsIsSharedByTheWorkers) {
  runs_take(milliseconds(3), 4);
  for (int i = 0; i < 4; ++i) {
    add(make_request(1, 4, i));
  }
  EXPECT_EQ(queue_.next_run(kStart).size, 1u);
}

TEST_F(RequestQueueTest, ABacklogIsMergedEvenWhereThatSeemsToSaveNothing) {
  for (int i = 0; i < 7; ++i) {
    add(keyed(1, 1, "ann"));
  }
  EXPECT_EQ(queue_.next_run(kStart).size, 1u);
  for (int i = 0; i < 5; ++i) {
    add(keyed(1, 1, "ann"));
  }
  EXPECT_EQ(queue_.next_run(kStart).size, 2u);
}

TEST_F(RequestQueueTest, ASharedUserCountsOnce) {
  runs_take(milliseconds(100));
  for (int i = 0; i < 5; ++i) {
    add(keyed(1, 1, "ann"));  // all of the same seed: equal user tensors
  }
  add(keyed(1, 2, "ann"));  // not the same user, whatever the key says
  add(make_request(1, 1, 1));
  add(keyed(1, 1, "bob"));
  add(keyed(1, 1, "ann"));
  const NextRun run = queue_.next_run(kStart);
  EXPECT_EQ(run.size, 9u);
  EXPECT_EQ(run.num_users, 4);
  const std::vector<QueueEntry> entries = queue_.take_front(run.size);
  std::vector<const runtime::Request*> requests;
  for (const QueueEntry& entry : entries) {
    requests.push_back(&entry.request);
  }
  EXPECT_EQ(runtime::batch(manifest_, requests).inputs.num_users, run.num_users);
}

TEST_F(RequestQueueTest, CountsRequestsNotTheirParts) {
  for (const bool is_last : {false, false, true}) {
    QueueEntry part{make_request(1, 2, 1), [](const InferOutcome&) {}, {}, kStart};
    part.is_last_part = is_last;
    queue_.add(std::move(part));
  }
  EXPECT_EQ(queue_.num_requests(), 1u);
  queue_.take_front(2);
  EXPECT_EQ(queue_.num_requests(), 1u);
  queue_.take_front(1);
  EXPECT_EQ(queue_.num_requests(), 0u);
}

TEST_F(RequestQueueTest, KnowsTheTimeOfWhatIsBefore) {
  add(make_request(1, 8, 1), milliseconds(100));
  add(make_request(1, 4, 2), milliseconds(200));
  const auto before = [&](milliseconds due) {
    return std::chrono::duration<double>(queue_.time_before(kStart + due)).count();
  };
  EXPECT_EQ(before(milliseconds(50)), 0);
  EXPECT_NEAR(before(milliseconds(150)), 0.008, 0.0005);
  EXPECT_NEAR(before(milliseconds(250)), 0.012, 0.0005);
}

}  // namespace
}  // namespace ikbo::server
