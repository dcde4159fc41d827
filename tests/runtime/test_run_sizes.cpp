// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "fixtures.h"
#include "runtime/run_sizes.h"

namespace ikbo::runtime::testing {
namespace {

std::vector<std::int64_t> users_of(const RunSizes& sizes) {
  std::vector<std::int64_t> steps;
  for (std::size_t u = 0; u < sizes.num_user_steps(); ++u) {
    steps.push_back(sizes.at(u, 0).num_users);
  }
  return steps;
}

std::vector<std::int64_t> candidates_of(const RunSizes& sizes) {
  std::vector<std::int64_t> steps;
  for (std::size_t c = 0; c < sizes.num_candidate_steps(); ++c) {
    steps.push_back(sizes.at(0, c).num_candidates);
  }
  return steps;
}

using Steps = std::vector<std::int64_t>;

TEST(RunSizes, DoubleUsersAndQuarterCandidates) {
  const RunSizes sizes({10, 100}, 1000);
  EXPECT_EQ(users_of(sizes), (Steps{1, 2, 4, 8, 10}));
  EXPECT_EQ(candidates_of(sizes), (Steps{16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100}));
  EXPECT_EQ(sizes.size(), 60U);
  EXPECT_EQ(sizes.index({4, 11}), 59U);
}

TEST(RunSizes, KeepAnExtentThatIsZero) {
  EXPECT_EQ(users_of(RunSizes({0, 20}, 9)), Steps{0});
  EXPECT_EQ(candidates_of(RunSizes({4, 0}, 9)), Steps{0});
  EXPECT_EQ(RunSizes({0, 20}, 9).find({0, 17}), (RunSizes::Place{0, 1}));
}

TEST(RunSizes, HaveNoMoreThanTheLimitsUpToTheSmallestOnes) {
  EXPECT_EQ(users_of(RunSizes({1, 3}, 9)), Steps{1});
  EXPECT_EQ(candidates_of(RunSizes({1, 3}, 9)), Steps{3});
  EXPECT_EQ(candidates_of(RunSizes({1, 16}, 9)), Steps{16});
  EXPECT_EQ(candidates_of(RunSizes({1, 17}, 9)), (Steps{16, 17}));
}

TEST(RunSizes, GrowByLongerStepsWhereTheyMustBeFewer) {
  // All: 4 x 12. Candidates by halves, then by doublings: 4 x 7, 4 x 4.
  EXPECT_EQ(candidates_of(RunSizes({8, 100}, 47)), (Steps{16, 24, 32, 48, 64, 96, 100}));
  EXPECT_EQ(candidates_of(RunSizes({8, 100}, 16)), (Steps{16, 32, 64, 100}));
  EXPECT_EQ(users_of(RunSizes({8, 100}, 16)), (Steps{1, 2, 4, 8}));
  const RunSizes few({8, 100}, 6);
  EXPECT_LE(few.size(), 6U);
  EXPECT_EQ(users_of(few).back(), 8);
  EXPECT_EQ(candidates_of(few).back(), 100);
  for (const std::int64_t limit : {std::int64_t{1}, std::int64_t{1} << 31}) {
    const RunSizes one({limit, limit}, 1);
    EXPECT_EQ(one.size(), 1U);
    EXPECT_EQ(one.at(0, 0), (RunSize{limit, limit}));
  }
}

TEST(RunSizes, NeverExceedTheirNumber) {
  for (const std::int64_t users : {0, 1, 3, 64, 1000}) {
    for (const std::int64_t candidates : {1, 16, 4096, 100'000}) {
      for (int max_sizes = 1; max_sizes < 200; max_sizes += 7) {
        const RunSizes sizes({users, candidates}, max_sizes);
        ASSERT_LE(sizes.size(), static_cast<std::size_t>(max_sizes));
        ASSERT_EQ(sizes.at(sizes.num_user_steps() - 1, sizes.num_candidate_steps() - 1),
                  (RunSize{users, candidates}));
      }
    }
  }
}

TEST(RunSizes, AreTheLeastThatHoldARun) {
  const RunSizes sizes({12, 1000}, 1000);
  for (std::int64_t users = 1; users <= 12; ++users) {
    for (std::int64_t candidates = 1; candidates <= 1000; ++candidates) {
      const auto place = sizes.find({users, candidates});
      ASSERT_TRUE(place.has_value());
      const RunSize size = sizes.at(place->user_step, place->candidate_step);
      ASSERT_GE(size.num_users, users);
      ASSERT_GE(size.num_candidates, candidates);
      ASSERT_LT(size.num_users, 2 * users);
      // Less than a quarter of padding, from where kernels tell sizes apart.
      ASSERT_LT(4 * (size.num_candidates - candidates), std::max<std::int64_t>(candidates, 64));
      if (place->candidate_step > 0) {
        ASSERT_LT(sizes.at(0, place->candidate_step - 1).num_candidates, candidates);
      }
    }
  }
}

TEST(RunSizes, HoldNoRunBeyondTheLimits) {
  const RunSizes sizes({12, 1000}, 50);
  EXPECT_FALSE(sizes.find({13, 1}).has_value());
  EXPECT_FALSE(sizes.find({1, 1001}).has_value());
  EXPECT_TRUE(sizes.find({12, 1000}).has_value());
  expect_contains(error_of([] { RunSizes({1, 1}, 0); }), "max_sizes must be at least 1; got 0");
}

}  // namespace
}  // namespace ikbo::runtime::testing
