// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "server/run_cost.h"

namespace ikbo::server {
namespace {

constexpr std::int64_t kMaxUsers = 64;
constexpr std::int64_t kMaxCandidates = 4096;

// What runs truly take in a test.
struct Truth {
  double fixed;
  double per_user;
  double per_candidate;

  double seconds(std::int64_t users, std::int64_t candidates) const {
    return fixed + per_user * static_cast<double>(users) +
           per_candidate * static_cast<double>(candidates);
  }
};

void measure_all_sizes(const Truth& truth, RunCost& cost) {
  for (const auto& [users, candidates] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                          {1, 1024},
                                          {16, 1024},
                                          {1, 4096},
                                          {64, 4096}}) {
    cost.add(users, candidates, truth.seconds(users, candidates));
  }
}

void expect_close(const RunCost& cost, const Truth& truth, double tolerance) {
  for (const std::int64_t users : {1, 7, 64}) {
    for (const std::int64_t candidates : {1, 500, 4096}) {
      const double expected = truth.seconds(users, candidates);
      EXPECT_NEAR(cost.seconds(users, candidates), expected, tolerance * expected)
          << users << " users, " << candidates << " candidates";
    }
  }
}

TEST(RunCost, KnowsNothingAtFirst) {
  const RunCost cost(kMaxUsers, kMaxCandidates);
  EXPECT_EQ(cost.seconds(1, 1), 0);
  EXPECT_EQ(cost.careful_seconds(64, 4096), 0);
}

TEST(RunCost, KnowsWhichRunAnswersSoonest) {
  RunCost cost(kMaxUsers, kMaxCandidates);
  EXPECT_EQ(cost.rows_of_next_run(0, 1), 0);
  measure_all_sizes({1e-3, 0, 1e-6}, cost);
  const double rows = 3e-4;
  for (const std::size_t workers : {1, 4}) {
    for (const int waiting : {1, 4, 20}) {
      // Of equal requests in runs of a size that divides them: the mean time to the answer.
      const auto mean = [&](int size) {
        const double runs = static_cast<double>(waiting) / size / static_cast<double>(workers);
        return (1e-3 + size * rows) * (runs + 1) / 2;
      };
      const double best = cost.rows_of_next_run(waiting * rows, workers) / rows;
      const int size = std::clamp(static_cast<int>(std::ceil(best)), 1, waiting);
      for (int other = 1; other <= waiting; ++other) {
        EXPECT_LE(mean(size), 1.05 * mean(other)) << waiting << " in runs of " << other;
      }
    }
  }
}

TEST(RunCost, FitsWhatIsExact) {
  for (const Truth& truth : {Truth{1e-3, 2e-5, 3e-6}, Truth{0, 0, 1e-6}, Truth{2e-3, 0, 0},
                             Truth{1e-4, 1e-4, 0}, Truth{0, 3e-4, 1e-6}}) {
    RunCost cost(kMaxUsers, kMaxCandidates);
    measure_all_sizes(truth, cost);
    expect_close(cost, truth, 0.01);
  }
}

TEST(RunCost, SplitsOffTheFixedPart) {
  const Truth truth{1e-3, 2e-5, 3e-6};
  RunCost cost(kMaxUsers, kMaxCandidates);
  measure_all_sizes(truth, cost);
  EXPECT_NEAR(cost.seconds_of_rows(10, 1000), 10 * 2e-5 + 1000 * 3e-6, 1e-4);
}

TEST(RunCost, NoPartIsNegative) {
  // Larger runs that take less, as when a cache warms up meanwhile.
  RunCost cost(kMaxUsers, kMaxCandidates);
  cost.add(1, 4096, 1e-3);
  cost.add(64, 1, 5e-3);
  cost.add(64, 4096, 2e-3);
  cost.add(1, 1, 4e-3);
  EXPECT_GE(cost.seconds(0, 0), 0);
  EXPECT_GE(cost.seconds(64, 0), cost.seconds(0, 0));
  EXPECT_GE(cost.seconds(0, 4096), cost.seconds(0, 0));
}

TEST(RunCost, OneSizeIsLearnedWithoutForgettingTheOthers) {
  const Truth truth{1e-3, 2e-5, 3e-6};
  RunCost cost(kMaxUsers, kMaxCandidates);
  measure_all_sizes(truth, cost);
  for (int i = 0; i < 10'000; ++i) {
    cost.add(1, 500, truth.seconds(1, 500));
  }
  expect_close(cost, truth, 0.05);
}

TEST(RunCost, FollowsAChangeOfSpeed) {
  const Truth before{1e-3, 2e-5, 3e-6};
  const Truth after{3e-3, 6e-5, 9e-6};
  RunCost cost(kMaxUsers, kMaxCandidates);
  measure_all_sizes(before, cost);
  measure_all_sizes(before, cost);
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const auto users = std::uniform_int_distribution<std::int64_t>(1, 64)(random);
    const auto candidates = std::uniform_int_distribution<std::int64_t>(1, 4096)(random);
    cost.add(users, candidates, after.seconds(users, candidates));
  }
  expect_close(cost, after, 0.05);
}

TEST(RunCost, ASlowRunIsNoNewSpeed) {
  const Truth truth{1e-3, 2e-5, 3e-6};
  RunCost cost(kMaxUsers, kMaxCandidates);
  for (int i = 0; i < 5; ++i) {
    measure_all_sizes(truth, cost);
  }
  cost.add(8, 1000, 100 * truth.seconds(8, 1000));
  expect_close(cost, truth, 0.1);
}

TEST(RunCost, IsCarefulByAsMuchAsItWasOff) {
  RunCost cost(kMaxUsers, kMaxCandidates);
  for (int i = 0; i < 20; ++i) {
    cost.add(1, 100, 1e-3);
  }
  EXPECT_NEAR(cost.careful_seconds(1, 100), 1.2e-3, 1e-5);
  for (int i = 0; i < 40; ++i) {
    cost.add(1, 100, i % 2 == 0 ? 0.8e-3 : 1.2e-3);
  }
  EXPECT_GT(cost.careful_seconds(1, 100), 1.3e-3);
  EXPECT_LT(cost.careful_seconds(1, 100), 1.6e-3);
}

}  // namespace
}  // namespace ikbo::server
