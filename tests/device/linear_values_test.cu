// SPDX-License-Identifier: Apache-2.0
// ikbo::linear on a GPU where a value that gets to a wrong place shows: integers that tell their
// place, NaN and infinities beside what is read, sizes around every edge in pairs, offsets of 64
// bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "linear_problem.cuh"
#include "pairwise.h"
#include "result_differences.h"

namespace ikbo::test {
namespace {

std::string name_of_case(const testing::TestParamInfo<LinearCase>& info) { return info.param.id(); }

class LinearValuesTest : public testing::TestWithParam<LinearCase> {};

TEST_P(LinearValuesTest, MatchesFp64Reference) {
  LinearRun run(GetParam());
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  EXPECT_EQ(wrong_elements(GetParam(), run.problem.params), "") << to_string(run.config);
  EXPECT_TRUE(run.problem.out.guards_are_intact()) << to_string(run.config);
  EXPECT_TRUE(run.workspace.guards_are_intact()) << to_string(run.config);
}

// One row of each weight is one 1: each output is an element of x_user, one of x_cand and 1. Every
// k is picked, M being not less than K.
std::vector<LinearCase> code_cases() {
  std::vector<LinearCase> all;
  const auto add = [&all](LinearCase c) {
    c.num_users = 9;
    c.num_candidates = 150;
    c.m = 1030;
    c.holes = Holes::kNone;
    c.values = Values::kCodes;
    all.push_back(c);
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const LinearTiling& tiling : all_tilings()) {
      add({.k_user = 1016, .k_cand = 1024, .dtype = dtype, .pinned = tiling});
      add({.k_user = 866, .k_cand = 1023, .dtype = dtype, .pinned = tiling});
      add({.k_user = 1023, .k_cand = 866, .dtype = dtype, .pinned = tiling});
    }
    add({.k_user = 17, .k_cand = 866, .dtype = dtype, .x_layout = Layout::kTransposed});
    add({.k_user = 17, .k_cand = 866, .dtype = dtype, .w_layout = Layout::kTransposed});
  }
  add({.k_user = 866, .k_cand = 1023, .dtype = DType::kFloat32});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Codes, LinearValuesTest, testing::ValuesIn(code_cases()), name_of_case);

// Every two of these values of two sizes, and of two layouts, meet in a case.
std::vector<LinearCase> pairwise_cases() {
  constexpr std::array kM{1, 8, 64, 200, 216, 224, 225, 433, 448, 449};
  constexpr std::array kK{1, 15, 16, 17, 866, 1023};
  constexpr std::array kB{1, 2, 3, 131, 132, 133, 1024, 3072};
  constexpr std::array kU{1, 15, 0};  // 0: as many as candidates
  constexpr std::array kLayouts{Layout::kDense, Layout::kSpaced, Layout::kOffset,
                                Layout::kTransposed};
  enum Parameter { kOfM, kOfKUser, kOfKCand, kOfB, kOfU, kOfX, kOfW, kOfDtype, kOfValues, kOfBias };
  // Products of the reference; the first choice of each size is the smallest.
  const auto products = [&](const std::vector<int>& row) {
    const auto choice = [&row](Parameter p) {
      return static_cast<std::size_t>(std::max(row[p], 0));
    };
    return 1.0 * kM[choice(kOfM)] * (kK[choice(kOfKUser)] + kK[choice(kOfKCand)]) *
           kB[choice(kOfB)];
  };
  std::vector<LinearCase> all;
  for (const std::vector<int>& row :
       pairwise_rows({10, 6, 6, 8, 3, 4, 4, 2, 2, 2}, products, 1e9)) {
    const int num_candidates = kB[row[kOfB]];
    const int num_users = kU[row[kOfU]];
    all.push_back({.num_users = num_users > 0 ? num_users : num_candidates,
                   .num_candidates = num_candidates,
                   .m = kM[row[kOfM]],
                   .k_user = kK[row[kOfKUser]],
                   .k_cand = kK[row[kOfKCand]],
                   .dtype = row[kOfDtype] == 0 ? DType::kFloat16 : DType::kBFloat16,
                   .x_layout = kLayouts[row[kOfX]],
                   .w_layout = kLayouts[row[kOfW]],
                   .values = row[kOfValues] == 0 ? Values::kNormal : Values::kTernary,
                   .has_bias = row[kOfBias] == 0});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Pairs, LinearValuesTest, testing::ValuesIn(pairwise_cases()),
                         name_of_case);

// More than 2^31 elements of x_cand, of the output, of the user partial.
std::vector<LinearCase> large_cases() {
  constexpr int kB = 2'100'000;
  return {
      {.num_users = 15,
       .num_candidates = kB,
       .m = 8,
       .k_user = 8,
       .k_cand = 1032,
       .holes = Holes::kNone},
      {.num_users = 15,
       .num_candidates = kB,
       .m = 8,
       .k_user = 8,
       .k_cand = 1030,
       .x_layout = Layout::kOffset,
       .holes = Holes::kNone},
      {.num_users = kB,
       .num_candidates = kB,
       .m = 1024,
       .k_user = 8,
       .k_cand = 16,
       .holes = Holes::kNone},
      {.num_users = kB,
       .num_candidates = kB,
       .m = 1024,
       .k_user = 8,
       .k_cand = 16,
       .dtype = DType::kFloat32,
       .holes = Holes::kNone},
  };
}

INSTANTIATE_TEST_SUITE_P(Large, LinearValuesTest, testing::ValuesIn(large_cases()), name_of_case);

class LinearLeakTest : public testing::TestWithParam<LinearCase> {};

// Every other candidate is NaN or infinite, and so are users whom no candidate names and what lies
// between the rows of x and of the weights: products with 0 would be NaN.
TEST_P(LinearLeakTest, PoisonStaysWithItsCandidate) {
  LinearCase c = GetParam();
  c.holes = Holes::kOddUsers;
  LinearRun clean_run(c);
  const std::vector<std::uint8_t> clean = clean_run.result();
  ASSERT_EQ(wrong_elements(c, clean_run.problem.params), "") << to_string(clean_run.config);
  for (const Gap gap : {Gap::kNaN, Gap::kInfinity}) {
    for (const Holes holes : {Holes::kOddCandidates, Holes::kEvenCandidates}) {
      c.gap = gap;
      c.holes = holes;
      const PeriodicHole poisoned = poisoned_candidates(holes);
      EXPECT_EQ(first_leak(LinearRun(c).result(), clean, c.dtype, c.m,
                           [&](std::size_t b) { return poisoned.holds(b); }),
                "")
          << (gap == Gap::kNaN ? "NaN, " : "infinities, ") << "holes " << static_cast<int>(holes)
          << ", " << to_string(clean_run.config);
    }
  }
}

std::vector<LinearCase> leak_cases() {
  struct Rows {
    int k;
    Layout layout;
  };
  std::vector<LinearCase> all;
  const auto add = [&all](LinearCase c) {
    c.num_users = 7;
    c.num_candidates = 131;
    c.m = 45;
    c.k_cand = c.k_user;
    all.push_back(c);
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const LinearTiling& tiling : all_tilings()) {
      // By the copy engine without and with gaps, in words of 4 bytes, element by element.
      for (const Rows& rows : {Rows{520, Layout::kDense}, Rows{517, Layout::kSpaced},
                               Rows{511, Layout::kSpaced}, Rows{519, Layout::kOffset}}) {
        add({.k_user = rows.k,
             .dtype = dtype,
             .x_layout = rows.layout,
             .w_layout = rows.layout,
             .pinned = tiling});
      }
    }
    add({.k_user = 33, .dtype = dtype, .x_layout = Layout::kTransposed});
  }
  add({.k_user = 33,
       .dtype = DType::kFloat32,
       .x_layout = Layout::kSpaced,
       .w_layout = Layout::kSpaced});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearLeakTest, testing::ValuesIn(leak_cases()), name_of_case);

}  // namespace
}  // namespace ikbo::test
