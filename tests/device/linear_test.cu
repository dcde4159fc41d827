// SPDX-License-Identifier: Apache-2.0
// ikbo::linear on a GPU against an fp64 reference: every output element of every case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "linear_problem.cuh"
#include "repeated_launches.cuh"
#include "result_differences.h"

namespace ikbo::test {
namespace {

class LinearTest : public testing::TestWithParam<LinearCase> {};

TEST_P(LinearTest, MatchesFp64Reference) {
  LinearRun run(GetParam());
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  EXPECT_EQ(wrong_elements(GetParam(), run.problem.params), "") << to_string(run.config);
  EXPECT_TRUE(run.problem.out.guards_are_intact()) << to_string(run.config);
  EXPECT_TRUE(run.workspace.guards_are_intact()) << to_string(run.config);
}

// Small enough for compute-sanitizer: each tiling, aligned and ragged.
std::vector<LinearCase> small_cases() {
  std::vector<LinearCase> all;
  for (const LinearTiling& tiling : all_tilings()) {
    for (const int k : {520, 514}) {
      all.push_back({.num_users = 3,
                     .num_candidates = 70,
                     .m = k == 520 ? 40 : 45,
                     .k_user = k,
                     .k_cand = k,
                     .activation = Activation::kRelu,
                     .pinned = tiling});
    }
  }
  all.push_back({.num_users = 3,
                 .num_candidates = 20,
                 .m = 45,
                 .k_user = 17,
                 .k_cand = 33,
                 .x_layout = Layout::kTransposed});
  all.push_back({.num_users = 3,
                 .num_candidates = 20,
                 .m = 45,
                 .k_user = 17,
                 .k_cand = 33,
                 .w_layout = Layout::kTransposed});
  return all;
}

// function size waiver: a table of cases, one field a line.
std::vector<LinearCase> cases() {
  std::vector<LinearCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const auto add = [&](LinearCase c) {
      c.dtype = dtype;
      all.push_back(c);
    };
    // Every tiling, with rows in groups of 1, 2, 4 and 8 and a partial last group.
    for (const LinearTiling& tiling : all_tilings()) {
      for (const int k : {520, 524, 526, 521}) {
        add({.num_users = 7,
             .num_candidates = 259,
             .m = 433,
             .k_user = k + 64,
             .k_cand = k,
             .pinned = tiling});
      }
      add({.num_users = 259,
           .num_candidates = 700,
           .m = 440,
           .k_user = 530,
           .k_cand = 866,
           .activation = Activation::kRelu,
           .values = Values::kTernary,
           .pinned = tiling});
    }
    for (const int m : {1, 2, 3, 8, 16, 63, 64, 65, 200, 225, 449, 1024}) {
      add({.num_users = 3, .num_candidates = 131, .m = m, .k_user = 33, .k_cand = 130});
    }
    for (const int k : {1, 7, 8, 15, 16, 17, 50, 63, 64, 65, 128, 866, 1023, 4096}) {
      for (const Layout layout :
           {Layout::kDense, Layout::kSpaced, Layout::kOffset, Layout::kTransposed}) {
        add({.num_users = 5,
             .num_candidates = 37,
             .m = 130,
             .k_user = k,
             .k_cand = k,
             .x_layout = layout,
             .w_layout = layout});
      }
      add({.num_users = 5,
           .num_candidates = 150,
           .m = 66,
           .k_user = 9,
           .k_cand = k,
           .w_layout = Layout::kTransposed});
    }
    for (const int b : {1, 2, 3, 9, 49, 132, 1024, 3001}) {
      add({.num_users = std::min(b, 15),
           .num_candidates = b,
           .m = 433,
           .k_user = 118,
           .k_cand = 866,
           .has_bias = false});
    }
    for (const Activation activation :
         {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSigmoid}) {
      for (const int m : {100, 256}) {
        add({.num_users = 40,
             .num_candidates = 20000,
             .m = m,
             .k_user = 100,
             .k_cand = 60,
             .activation = activation});
        add({.num_users = 4,
             .num_candidates = 50,
             .m = m,
             .k_user = 1000,
             .k_cand = 2000,
             .activation = activation});
      }
    }
    // One candidate per user, many users, more tiles than CTAs.
    add({.num_users = 20000,
         .num_candidates = 20000,
         .m = 300,
         .k_user = 90,
         .k_cand = 130,
         .holes = Holes::kNone,
         .values = Values::kTernary});
    add({.num_users = 1500,
         .num_candidates = 100003,
         .m = 433,
         .k_user = 120,
         .k_cand = 86,
         .holes = Holes::kNone});
  }
  for (const int m : {1, 50, 130}) {
    all.push_back({.num_users = 3,
                   .num_candidates = 200,
                   .m = m,
                   .k_user = 30,
                   .k_cand = 45,
                   .dtype = DType::kFloat32,
                   .activation = Activation::kSilu});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Small, LinearTest, testing::ValuesIn(small_cases()),
                         [](const auto& info) { return info.param.id(); });
INSTANTIATE_TEST_SUITE_P(Shapes, LinearTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.id(); });

// Few rows with a split sum, and many tiles per CTA.
std::vector<LinearCase> repeated_cases() {
  return {{.num_users = 15,
           .num_candidates = 70,
           .m = 433,
           .k_user = 1178,
           .k_cand = 866,
           .activation = Activation::kSilu,
           .holes = Holes::kNone},
          {.num_users = 300,
           .num_candidates = 30011,
           .m = 433,
           .k_user = 300,
           .k_cand = 866,
           .holes = Holes::kNone}};
}

class LinearRepeatTest : public testing::TestWithParam<LinearCase> {};

TEST_P(LinearRepeatTest, LaunchesAreBitwiseEqual) {
  LinearRun run(GetParam());
  const auto launch = [&run](void* out) {
    run.problem.params.out = out;
    run();
  };
  EXPECT_EQ(first_difference(run.problem.out, run.workspace, launch), "") << to_string(run.config);
}

TEST_P(LinearRepeatTest, ReplaysOfAGraphAreBitwiseEqual) {
  LinearRun run(GetParam());
  EXPECT_EQ(first_different_replay(run.problem.out, run.workspace, run), "")
      << to_string(run.config);
}

TEST_P(LinearRepeatTest, RunsOnTwoStreamsAtOnce) {
  LinearRun runs[2] = {LinearRun(GetParam()), LinearRun(GetParam())};
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  const std::vector<std::uint8_t> first = runs[0].result();
  runs[0].problem.out.poison();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 2; ++i) runs[i](streams[i]);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(first, runs[i].problem.read_out())
        << "stream " << i << " " << to_string(runs[i].config);
    cudaStreamDestroy(streams[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearRepeatTest, testing::ValuesIn(repeated_cases()),
                         [](const auto& info) { return info.param.id(); });

// Runs a problem with the config that it gets or, with `pinned`, with one tiling for both stages.
std::vector<std::uint8_t> result_of(LinearProblem& problem, const LinearTiling& pinned) {
  LinearConfig config = select_linear_config(problem.params, query_device_limits(0));
  if (pinned.tile_rows != 0) config.user = config.candidate = pinned;
  const GuardedBuffer workspace(linear_workspace_bytes(problem.params, config));
  problem.params.workspace = workspace.data();
  problem.out.poison();
  linear(problem.params, config, query_device_limits(0), nullptr);
  return problem.read_out();
}

// More tiles than CTAs in every tiling, so that rows lie in first and in later tiles of a CTA.
LinearCase batch_case(const LinearTiling& tiling) {
  return {.num_users = 300,
          .num_candidates = tiling.split_k > 1 ? 700 : 40011,
          .m = 433,
          .k_user = 530,
          .k_cand = 866,
          .activation = Activation::kSilu,
          .holes = Holes::kNone,
          .pinned = tiling};
}

class LinearBatchTest : public testing::TestWithParam<LinearTiling> {};

// The bits of a candidate's row whatever the others are, with one tiling.
TEST_P(LinearBatchTest, RowsDoNotDependOnTheirBatch) {
  const LinearCase c = batch_case(GetParam());
  LinearProblem problem(c);
  const std::vector<std::uint8_t> all = result_of(problem, c.pinned);
  const std::size_t row_bytes = static_cast<std::size_t>(c.m) * size_of(c.dtype);
  const LinearParams whole = problem.params;
  for (const int first : {0, 1, 77, c.num_candidates / 2, c.num_candidates - 1}) {
    for (const int count : {1, 100}) {
      if (first + count > c.num_candidates) continue;
      problem.params = whole;
      problem.params.x_cand =
          static_cast<const std::uint16_t*>(whole.x_cand) + first * whole.stride_x_cand_b;
      problem.params.cand_to_user += first;
      problem.params.num_candidates = count;
      const std::vector<std::uint8_t> few = result_of(problem, c.pinned);
      EXPECT_TRUE(
          std::equal(few.begin(), few.begin() + count * row_bytes, all.begin() + first * row_bytes))
          << count << " rows from " << first;
    }
  }
}

TEST_P(LinearBatchTest, RowsDoNotDependOnTheirOrder) {
  const LinearCase c = batch_case(GetParam());
  LinearProblem problem(c);
  const std::vector<std::uint8_t> forward = result_of(problem, c.pinned);
  // Last candidate first: a negative stride would leave the kernel, so the rows are moved.
  const std::size_t row = static_cast<std::size_t>(problem.params.stride_x_cand_b) * 2;
  std::vector<std::uint8_t> x(problem.x_cand.buffer.bytes());
  std::vector<std::int32_t> index = make_index(c);
  IKBO_CUDA_CHECK(cudaMemcpy(x.data(), problem.params.x_cand, x.size(), cudaMemcpyDeviceToHost),
                  "x_cand");
  for (std::size_t b = 0; b < index.size() / 2; ++b) {
    std::swap_ranges(x.begin() + b * row, x.begin() + (b + 1) * row,
                     x.begin() + (index.size() - 1 - b) * row);
  }
  std::reverse(index.begin(), index.end());
  IKBO_CUDA_CHECK(
      cudaMemcpy(problem.x_cand.data(c.dtype), x.data(), x.size(), cudaMemcpyHostToDevice),
      "x_cand");
  IKBO_CUDA_CHECK(
      cudaMemcpy(problem.index.data(), index.data(), problem.index.bytes(), cudaMemcpyHostToDevice),
      "index");
  std::vector<std::uint8_t> backward = result_of(problem, c.pinned);
  const std::size_t out_row = static_cast<std::size_t>(c.m) * size_of(c.dtype);
  for (std::size_t b = 0; b < index.size(); ++b) {
    ASSERT_TRUE(std::equal(forward.begin() + b * out_row, forward.begin() + (b + 1) * out_row,
                           backward.begin() + (index.size() - 1 - b) * out_row))
        << "candidate " << b;
  }
}

// Fewer CTAs than multiprocessors, each with more of the tiles.
TEST_P(LinearBatchTest, RowsDoNotDependOnTheSharingOfWork) {
  if (GetParam().split_k > 1) return;  // a CTA for every tile, whatever the multiprocessors
  const LinearCase c = batch_case(GetParam());
  LinearRun run(c);
  const std::vector<std::uint8_t> all = run.result();
  const int num_sms = run.limits.num_sms;
  for (const int few : {num_sms / 2, num_sms / 4, 7, 1}) {
    run.limits.num_sms = few;
    run.workspace.poison();
    EXPECT_EQ(first_different_element(run.result(), all, c.dtype, c.m), "")
        << few << " of " << num_sms << " multiprocessors, " << to_string(run.config);
  }
}

// Tilings that do not split the sum add in the same order, whatever their size.
TEST_P(LinearBatchTest, RowsDoNotDependOnTheSizeOfTheTile) {
  if (GetParam().split_k > 1) return;  // another order of sums, of its own
  const LinearCase c = batch_case(GetParam());
  LinearProblem problem(c);
  EXPECT_EQ(result_of(problem, c.pinned), result_of(problem, {128, 128, 1}));
}

INSTANTIATE_TEST_SUITE_P(Tilings, LinearBatchTest, testing::ValuesIn(all_tilings()),
                         [](const auto& info) {
                           return std::to_string(info.param.tile_rows) + "x" +
                                  std::to_string(info.param.tile_m) + "_" +
                                  std::to_string(info.param.split_k);
                         });

}  // namespace
}  // namespace ikbo::test
