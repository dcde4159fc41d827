// SPDX-License-Identifier: Apache-2.0
// ikbo::lce on a GPU where a value that gets to a wrong place shows: integers that tell their
// place, NaN and infinities beside what is read, sizes around every edge in pairs, offsets of 64
// bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lce_problem.cuh"
#include "pairwise.h"
#include "result_differences.h"

namespace ikbo::test {
namespace {

std::string name_of_case(const testing::TestParamInfo<LceCase>& info) { return info.param.id(); }

class LceValuesTest : public testing::TestWithParam<LceCase> {};

TEST_P(LceValuesTest, MatchesFp64Reference) {
  LceRun run(GetParam());
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  EXPECT_EQ(wrong_elements(GetParam(), run.problem.params), "") << to_string(run.config);
  EXPECT_TRUE(run.problem.out.guards_are_intact()) << to_string(run.config);
  EXPECT_TRUE(run.workspace->guards_are_intact()) << to_string(run.config);
}

// One row of each weight is one 1: each output is an element of e_user, one of e_cand and 1. Every
// k is picked where M is not less than K.
std::vector<LceCase> code_cases() {
  std::vector<LceCase> all;
  const auto add = [&all](LceCase c) {
    c.values = Values::kCodes;
    c.spare_rows = 1;
    all.push_back(c);
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int n : {64, 72, 256}) {
      add({.num_users = 5,  // tiles of 224, 256 and 192
           .num_candidates = 21,
           .m = n == 64   ? 1110
                : n == 72 ? 1270
                          : 1150,
           .n = n,
           .k_user = 866,
           .k_cand = 1023,
           .dtype = dtype,
           .spare_columns = n == 72 ? 8 : 0});
      // k runs over both sides.
      add({.num_users = 140,
           .num_candidates = 139,
           .m = 225,
           .n = n,
           .k_user = 100,
           .k_cand = 200,
           .dtype = dtype});
    }
    // The narrowest tiles.
    add({.num_users = 2,
         .num_candidates = 3,
         .m = 433,
         .n = 64,
         .k_user = 430,
         .k_cand = 390,
         .dtype = dtype});
    add({.num_users = 5,
         .num_candidates = 150,
         .m = 433,
         .n = 256,
         .k_user = 17,
         .k_cand = 433,
         .dtype = dtype,
         .list = {200, 33, 1, 199}});
    for (const bool transposed : {false, true}) {
      add({.num_users = 5,
           .num_candidates = 21,
           .m = 200,
           .n = 13,
           .k_user = 35,
           .k_cand = 149,
           .dtype = dtype,
           .transposed = transposed});
    }
  }
  add({.num_users = 5,
       .num_candidates = 21,
       .m = 200,
       .n = 24,
       .k_user = 35,
       .k_cand = 149,
       .dtype = DType::kFloat32});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Codes, LceValuesTest, testing::ValuesIn(code_cases()), name_of_case);

// Every two of these values of two sizes meet in a case.
std::vector<LceCase> pairwise_cases() {
  constexpr std::array kM{1, 8, 64, 200, 216, 224, 225, 433, 448, 449};
  constexpr std::array kK{1, 15, 16, 17, 866, 1023};
  constexpr std::array kB{1, 2, 3, 131, 132, 133, 1024, 3072};
  constexpr std::array kN{8, 64, 72, 256};
  constexpr std::array kU{1, 15, 0};  // 0: as many as candidates
  enum Parameter { kOfM, kOfKUser, kOfKCand, kOfB, kOfN, kOfU, kOfDtype, kOfValues, kOfBias };
  // Products of the reference; the first choice of each size is the smallest.
  const auto products = [&](const std::vector<int>& row) {
    const auto choice = [&row](Parameter p) {
      return static_cast<std::size_t>(std::max(row[p], 0));
    };
    return 1.0 * kM[choice(kOfM)] * (kK[choice(kOfKUser)] + kK[choice(kOfKCand)]) *
           kB[choice(kOfB)] * kN[choice(kOfN)];
  };
  std::vector<LceCase> all;
  for (const std::vector<int>& row : pairwise_rows({10, 6, 6, 8, 4, 3, 2, 2, 2}, products, 5e9)) {
    const int num_candidates = kB[row[kOfB]];
    const int num_users = kU[row[kOfU]];
    all.push_back({.num_users = num_users > 0 ? num_users : num_candidates,
                   .num_candidates = num_candidates,
                   .m = kM[row[kOfM]],
                   .n = kN[row[kOfN]],
                   .k_user = kK[row[kOfKUser]],
                   .k_cand = kK[row[kOfKCand]],
                   .dtype = row[kOfDtype] == 0 ? DType::kFloat16 : DType::kBFloat16,
                   .values = row[kOfValues] == 0 ? Values::kNormal : Values::kTernary,
                   .spare_rows = 1,
                   .has_bias = row[kOfBias] == 0});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Pairs, LceValuesTest, testing::ValuesIn(pairwise_cases()), name_of_case);

// More than 2^31 elements of the output.
INSTANTIATE_TEST_SUITE_P(
    Large, LceValuesTest,
    testing::Values(LceCase{
        .num_users = 30, .num_candidates = 66000, .m = 130, .n = 256, .k_user = 8, .k_cand = 16}),
    name_of_case);

struct LeakCase {
  LceCase sizes;
  LceKernel kernel;
  bool dual_k = false;
};

class LceLeakTest : public testing::TestWithParam<LeakCase> {};

// Every other candidate is NaN or infinite, and so are users whom no candidate names, rows past K
// and columns past N and past the K of the weights: products with 0 would be NaN.
TEST_P(LceLeakTest, PoisonStaysWithItsCandidate) {
  LceCase c = GetParam().sizes;
  c.holes = Holes::kOddUsers;
  LceRun clean_run(c);
  ASSERT_EQ(clean_run.config.kernel, GetParam().kernel) << to_string(clean_run.config);
  ASSERT_EQ(clean_run.config.dual_k, GetParam().dual_k) << to_string(clean_run.config);
  const std::vector<std::uint16_t> clean = clean_run.result();
  ASSERT_EQ(wrong_elements(c, clean_run.problem.params), "") << to_string(clean_run.config);
  const std::size_t row_size = static_cast<std::size_t>(c.m) * c.n;
  for (const Gap gap : {Gap::kNaN, Gap::kInfinity}) {
    for (const Holes holes : {Holes::kOddCandidates, Holes::kEvenCandidates}) {
      c.gap = gap;
      c.holes = holes;
      const PeriodicHole poisoned = poisoned_candidates(holes);
      EXPECT_EQ(first_leak(LceRun(c).result(), clean, c.dtype, row_size,
                           [&](std::size_t b) { return poisoned.holds(b); }),
                "")
          << (gap == Gap::kNaN ? "NaN, " : "infinities, ") << "holes " << static_cast<int>(holes)
          << ", " << to_string(clean_run.config);
    }
  }
}

// function size waiver: a table of cases, one field a line.
std::vector<LeakCase> leak_cases() {
  std::vector<LeakCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int n : {64, 72, 256}) {  // with one slice, neighbours share a CTA
      const LceCase two_stages{.num_users = 7,
                               .num_candidates = 61,
                               .m = 433,
                               .n = n,
                               .k_user = 101,
                               .k_cand = 87,
                               .dtype = dtype,
                               .spare_rows = 3,
                               .spare_columns = 8};
      all.push_back({two_stages, LceKernel::kSm90});
      LceCase few = two_stages;
      few.num_users = 2;
      few.num_candidates = 5;
      all.push_back({few, LceKernel::kSm90});
      LceCase list = two_stages;
      list.list = {33, 1, 53};
      all.push_back({list, LceKernel::kSm90});
      LceCase dual = two_stages;
      dual.num_users = 140;
      dual.num_candidates = 131;
      dual.m = 225;
      all.push_back({dual, LceKernel::kSm90, true});
    }
    LceCase generic{.num_users = 5,
                    .num_candidates = 21,
                    .m = 70,
                    .n = 13,
                    .k_user = 35,
                    .k_cand = 49,
                    .dtype = dtype,
                    .spare_rows = 3,
                    .spare_columns = 3};
    all.push_back({generic, LceKernel::kMma});
    generic.transposed = true;
    all.push_back({generic, LceKernel::kMma});
  }
  all.push_back({{.num_users = 5,
                  .num_candidates = 21,
                  .m = 70,
                  .n = 24,
                  .k_user = 35,
                  .k_cand = 49,
                  .dtype = DType::kFloat32,
                  .spare_rows = 3,
                  .spare_columns = 3},
                 LceKernel::kSimt});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, LceLeakTest, testing::ValuesIn(leak_cases()),
                         [](const auto& info) { return info.param.sizes.id(); });

TEST(PairwiseRows, EveryTwoChoicesMeetAtLittleCost) {
  const std::vector<int> sizes{3, 2, 4, 3};
  const auto cost = [](const std::vector<int>& row) {
    return (1.0 + std::max(row[0], 0)) * (1.0 + std::max(row[2], 0)) * (1.0 + std::max(row[3], 0));
  };
  const auto rows = pairwise_rows(sizes, cost, 12);
  for (std::size_t p = 0; p < sizes.size(); ++p) {
    for (std::size_t q = p + 1; q < sizes.size(); ++q) {
      for (int pair = 0; pair < sizes[p] * sizes[q]; ++pair) {
        EXPECT_TRUE(std::any_of(rows.begin(), rows.end(),
                                [&](const std::vector<int>& row) {
                                  return row[p] == pair % sizes[p] && row[q] == pair / sizes[p];
                                }))
            << p << " " << q << " " << pair;
      }
    }
  }
  EXPECT_LT(rows.size(), 18u);
  for (const std::vector<int>& row : rows) EXPECT_LE(cost(row), 12);
}

// fp16: 1 is 0x3C00, an infinity 0x7C00, a NaN 0x7E00.
TEST(FirstLeak, IsTold) {
  using Words = std::vector<std::uint16_t>;
  const auto odd = [](std::size_t row) { return row % 2 == 1; };
  const Words clean{0x3C00, 0x3C00, 0x3C00, 0x3C00};
  EXPECT_EQ(first_leak(Words{0x3C00, 0x3C00, 0x7E00, 0xFC00}, clean, DType::kFloat16, 2, odd), "");
  EXPECT_EQ(first_leak(Words{0x3C00, 0x7E00, 0x7E00, 0x7C00}, clean, DType::kFloat16, 2, odd),
            "element 1 of row 0 is 0x7e00, without poison elsewhere 0x3c00");
  EXPECT_EQ(first_leak(Words{0x3C00, 0x3C00, 0x7E00, 0x3C01}, clean, DType::kFloat16, 2, odd),
            "element 1 of row 1 is 0x3c01, which is finite, though the row is poisoned");
  EXPECT_EQ(
      first_different_element(Words{0x3C00, 0x3C00, 0x3C01, 0x3C02}, clean, DType::kFloat16, 2),
      "2 of 4 elements differ, the first is 0 of row 1: 0x3c01, not 0x3c00");
}

}  // namespace
}  // namespace ikbo::test
