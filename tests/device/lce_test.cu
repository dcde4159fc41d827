// SPDX-License-Identifier: Apache-2.0
// ikbo::lce on a GPU against an fp64 reference: every output element of every case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "lce_problem.cuh"
#include "repeated_launches.cuh"
#include "two_streams.cuh"

namespace ikbo::test {
namespace {

class LceTest : public testing::TestWithParam<LceCase> {};

TEST_P(LceTest, MatchesFp64Reference) {
  const LceCase& c = GetParam();
  LceRun run(c);
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  EXPECT_EQ(wrong_elements(c, run.problem.params), "") << to_string(run.config);
  EXPECT_TRUE(run.problem.out.guards_are_intact()) << to_string(run.config);
  EXPECT_TRUE(run.workspace->guards_are_intact()) << to_string(run.config);
}

// function size waiver: a table of cases, one field a line.
std::vector<LceCase> cases() {
  std::vector<LceCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int m : {1, 8, 64, 65, 200, 224, 225, 433, 449}) {
      all.push_back({.num_users = 3,
                     .num_candidates = 131,
                     .m = m,
                     .n = 72,
                     .k_user = 33,
                     .k_cand = 130,
                     .dtype = dtype});
    }
    for (const int k : {1, 15, 16, 17, 63, 64, 65, 866, 1023}) {
      all.push_back({.num_users = 5,
                     .num_candidates = 37,
                     .m = 130,
                     .n = 64,
                     .k_user = k,
                     .k_cand = k,
                     .dtype = dtype,
                     .spare_rows = 3});
    }
    for (const int n : {8, 32, 64, 72, 128, 256, 13}) {
      all.push_back({.num_users = 2,
                     .num_candidates = 9,
                     .m = 70,
                     .n = n,
                     .k_user = 40,
                     .k_cand = 70,
                     .dtype = dtype,
                     .order = Order::kSorted,
                     .has_bias = false});
    }
    for (const int b : {1, 2, 3, 132, 133, 1024}) {
      all.push_back({.num_users = std::min(b, 15),
                     .num_candidates = b,
                     .m = 433,
                     .n = 256,
                     .k_user = 118,
                     .k_cand = 86,
                     .dtype = dtype,
                     .spare_rows = 1});
    }
    all.push_back({.num_users = 40,
                   .num_candidates = 40,
                   .m = 96,
                   .n = 64,
                   .k_user = 50,
                   .k_cand = 60,
                   .dtype = dtype});
    all.push_back({.num_users = 9,
                   .num_candidates = 64,
                   .m = 433,
                   .n = 256,
                   .k_user = 100,
                   .k_cand = 200,
                   .dtype = dtype,
                   .order = Order::kAllOneUser});
    all.push_back({.num_users = 7,
                   .num_candidates = 100,
                   .m = 433,
                   .n = 256,
                   .k_user = 500,
                   .k_cand = 866,
                   .dtype = dtype,
                   .values = Values::kTernary});
    all.push_back({.num_users = 3,
                   .num_candidates = 20,
                   .m = 50,
                   .n = 24,
                   .k_user = 30,
                   .k_cand = 40,
                   .dtype = dtype,
                   .transposed = true});
  }
  all.push_back({.num_users = 3,
                 .num_candidates = 20,
                 .m = 50,
                 .n = 24,
                 .k_user = 30,
                 .k_cand = 40,
                 .dtype = DType::kFloat32});
  // As many users as candidates: k runs over both sides.
  for (const int m : {1, 65, 192, 256, 433}) {
    all.push_back({.num_users = 210,
                   .num_candidates = 201,
                   .m = m,
                   .n = m == 65 ? 64 : 256,
                   .k_user = 118,
                   .k_cand = 86,
                   .values = m == 433 ? Values::kTernary : Values::kNormal,
                   .spare_rows = 1,
                   .has_bias = m != 192});
  }
  // So few that every tile has a multiprocessor of its own: tiles of each width, both stages at
  // once.
  for (const int b : {1, 2, 4, 8, 9, 16}) {
    for (const int users : b == 1 ? std::vector{1} : std::vector{1, b}) {
      all.push_back({.num_users = users,
                     .num_candidates = b,
                     .m = b == 9 ? 300 : 433,
                     .n = b == 16 ? 64 : 256,
                     .k_user = 1178,
                     .k_cand = 866,
                     .dtype = users == 1 ? DType::kFloat16 : DType::kBFloat16,
                     .spare_rows = 1});
    }
  }
  for (const std::vector<int>& list : std::vector<std::vector<int>>{
           {32, 64}, {1, 2, 3}, {33, 1, 47, 16}, {866}, {40, 400, 8, 418}, std::vector(32, 5)}) {
    for (const int m : {433, 64}) {
      all.push_back({.num_users = 4,
                     .num_candidates = 150,
                     .m = m,
                     .n = m == 64 ? 24 : 256,
                     .k_user = 70,
                     .k_cand = std::accumulate(list.begin(), list.end(), 0),
                     .dtype = m == 64 ? DType::kBFloat16 : DType::kFloat16,
                     .spare_rows = 1,
                     .list = list});
    }
  }
  // More than 2^31 elements of E, and 10,000 candidates a user.
  all.push_back({.num_users = 10,
                 .num_candidates = 100'000,
                 .m = 16,
                 .n = 512,
                 .k_user = 8,
                 .k_cand = 44,
                 .order = Order::kSorted});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, LceTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.id(); });

// For tools that make a kernel a hundred times slower: every stage and both forms of every size.
std::vector<LceCase> small_cases() {
  const LceCase two_stages{
      .num_users = 2, .num_candidates = 9, .m = 70, .n = 72, .k_user = 40, .k_cand = 70};
  LceCase wide = two_stages;
  wide.m = 433;
  wide.dtype = DType::kBFloat16;
  LceCase many_users = two_stages;  // two users a CTA
  many_users.num_users = 140;
  many_users.num_candidates = 300;
  many_users.n = 128;
  LceCase dual = two_stages;
  dual.num_users = 140;
  dual.num_candidates = 130;
  LceCase list = two_stages;
  list.list = {33, 1, 36};
  return {two_stages, wide, many_users, dual, list};
}

INSTANTIATE_TEST_SUITE_P(Small, LceTest, testing::ValuesIn(small_cases()),
                         [](const auto& info) { return info.param.id(); });

const LceCase kMiddle{
    .num_users = 15, .num_candidates = 257, .m = 433, .n = 256, .k_user = 300, .k_cand = 866};

const LceCase kOneCandidateAUser{
    .num_users = 210, .num_candidates = 201, .m = 433, .n = 256, .k_user = 118, .k_cand = 86};
const LceCase kFewTiles{
    .num_users = 3, .num_candidates = 8, .m = 433, .n = 256, .k_user = 1178, .k_cand = 866};

TEST(LceDeterminism, LaunchesAreBitwiseEqual) {
  for (const LceCase& c : {kMiddle, kOneCandidateAUser, kFewTiles}) {
    LceRun run(c);
    const auto launch = [&run](void* out) {
      run.problem.params.out = out;
      run();
    };
    EXPECT_EQ(first_difference(run.problem.out, *run.workspace, launch), "")
        << to_string(run.config);
  }
}

TEST(LceDeterminism, ReplaysOfAGraphAreBitwiseEqual) {
  for (const LceCase& c : {kMiddle, kOneCandidateAUser, kFewTiles}) {
    LceRun run(c);
    EXPECT_EQ(first_different_replay(run.problem.out, *run.workspace, run), "")
        << to_string(run.config);
  }
}

TEST(LceDeterminism, AnotherLaunchIsTold) {
  const GuardedBuffer out(64);
  int launches = 0;
  const auto launch = [&launches](void* to) {
    IKBO_CUDA_CHECK(cudaMemset(to, ++launches == 500 ? 1 : 0, 64), "out");
  };
  EXPECT_EQ(first_difference(out, out, launch), "launch 498: 32 of 32 words differ");
}

TEST(LceDeterminism, AnotherReplayIsTold) {
  const GuardedBuffer out(64);
  const GuardedBuffer spare(64);
  int launches = 0;  // the captured one writes something else
  const auto launch = [&](cudaStream_t stream) {
    IKBO_CUDA_CHECK(cudaMemsetAsync(out.data(), launches++, 64, stream), "out");
  };
  EXPECT_EQ(first_different_replay(out, spare, launch), "replay 0: 32 of 32 words differ");
}

TEST(LceDeterminism, ResultsDoNotDependOnTheSharingOfWork) {
  LceRun run(kMiddle);
  const std::vector<std::uint16_t> all = run.result();
  for (const int num_sms : {1, 7, 66}) {
    LceRun narrow(kMiddle, num_sms);
    EXPECT_EQ(all, narrow.result()) << num_sms << " multiprocessors";
  }
}

TEST(LceDeterminism, CandidatesDoNotDependOnTheirBatch) {
  LceRun run(kMiddle);
  const std::vector<std::uint16_t> all = run.result();
  // The last 100 candidates alone, with all users.
  constexpr int kFew = 100;
  const int skipped = kMiddle.num_candidates - kFew;
  LceParams& p = run.problem.params;
  p.e_cand = static_cast<const std::uint16_t*>(p.e_cand) + skipped * p.stride_e_cand_b;
  p.cand_to_user += skipped;
  p.num_candidates = kFew;
  const std::vector<std::uint16_t> few = run.result();
  const std::size_t size = static_cast<std::size_t>(kMiddle.m) * kMiddle.n;
  EXPECT_TRUE(std::equal(few.begin(), few.begin() + kFew * size, all.begin() + skipped * size));
}

// A candidate and its user without all others: narrower tiles, the same sums.
TEST(LceDeterminism, ACandidateAloneHasTheSameBits) {
  LceCase c = kMiddle;
  c.k_user = 500;  // long enough for two stages
  LceRun run(c);
  const std::vector<std::uint16_t> all = run.result();
  const std::vector<std::int32_t> index = make_index(c);
  const std::size_t size = static_cast<std::size_t>(c.m) * c.n;
  for (const int b : {0, 100, c.num_candidates - 1}) {
    LceRun alone(c);
    LceParams& p = alone.problem.params;
    p.e_user = static_cast<const std::uint16_t*>(p.e_user) + index[b] * p.stride_e_user_u;
    p.e_cand = static_cast<const std::uint16_t*>(p.e_cand) + b * p.stride_e_cand_b;
    p.num_users = 1;
    p.num_candidates = 1;
    IKBO_CUDA_CHECK(cudaMemset(alone.problem.index.data(), 0, alone.problem.index.bytes()),
                    "index");
    alone.select();
    EXPECT_LT(alone.config.tile_m, run.config.tile_m);
    EXPECT_FALSE(alone.config.dual_k);
    const std::vector<std::uint16_t> one = alone.result();
    EXPECT_TRUE(std::equal(one.begin(), one.begin() + size, all.begin() + b * size)) << b;
  }
}

TEST(LcePack, PackedWeightsGiveTheSameBits) {
  LceRun run(kMiddle);
  const std::vector<std::uint16_t> plain = run.result();
  LceParams& p = run.problem.params;
  const GuardedBuffer w_user(lce_packed_bytes(p.k_user, run.config));
  const GuardedBuffer w_cand(lce_packed_bytes(p.k_cand, run.config));
  lce_pack(p.w_user, p.stride_w_user_m, 1, p.m, p.k_user, p.dtype, run.config, w_user.data(),
           nullptr);
  lce_pack(p.w_cand, p.stride_w_cand_m, 1, p.m, p.k_cand, p.dtype, run.config, w_cand.data(),
           nullptr);
  p.w_cand_packed = w_cand.data();
  EXPECT_EQ(plain, run.result());
  p.w_user_packed = w_user.data();
  EXPECT_EQ(plain, run.result());
  EXPECT_TRUE(w_user.guards_are_intact() && w_cand.guards_are_intact());
}

TEST(LceStreams, TwoStreamsAndAGraphAtOnce) {
  LceRun one(kMiddle);
  LceRun two(
      {.num_users = 3, .num_candidates = 900, .m = 64, .n = 128, .k_user = 64, .k_cand = 90});
  expect_no_change_by_the_other(one, two);
}

}  // namespace
}  // namespace ikbo::test
