// SPDX-License-Identifier: Apache-2.0
// ikbo::linear on a GPU against an fp64 reference: every output element of every case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/linear.h"
#include "repeated_launches.cuh"

namespace ikbo::test {
namespace {

// A layout of [rows, k]: where its elements lie in a buffer that is NaN everywhere else.
enum class Layout {
  kDense,
  kSpaced,      // 3 more elements a row
  kOffset,      // starts 5 elements after an aligned address, 1 more element a row
  kTransposed,  // k outermost
};

// Which rows stay NaN besides: none, or every other user (which no candidate names), one candidate
// and one row of w_cand.
enum class Holes { kNone, kRows };

struct LinearCase {
  int num_users;
  int num_candidates;
  int m;
  int k_user;
  int k_cand;
  DType dtype = DType::kFloat16;
  Activation activation = Activation::kNone;
  Layout x_layout = Layout::kDense;
  Layout w_layout = Layout::kDense;
  Holes holes = Holes::kRows;
  Values values = Values::kNormal;
  bool has_bias = true;
  LinearTiling pinned = {};  // of both stages; none: the one that is selected

  std::string id() const {
    std::string text = "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) +
                       "_M" + std::to_string(m) + "_Ku" + std::to_string(k_user) + "_Kc" +
                       std::to_string(k_cand) + "_" + std::string(name_of(dtype));
    for (const int choice :
         {static_cast<int>(activation), static_cast<int>(x_layout), static_cast<int>(w_layout),
          static_cast<int>(holes), static_cast<int>(values), static_cast<int>(has_bias),
          pinned.tile_rows, pinned.tile_m, pinned.split_k}) {
      text += "_" + std::to_string(choice);
    }
    return text;
  }
};

struct Matrix {
  Matrix(Layout layout, int rows, int k, DType dtype)
      : offset(layout == Layout::kOffset ? 5 : 0),
        stride_row(layout == Layout::kTransposed ? 1
                   : layout == Layout::kSpaced   ? k + 3
                   : layout == Layout::kOffset   ? k + 1
                                                 : k),
        stride_k(layout == Layout::kTransposed ? rows : 1),
        buffer((offset + (rows - 1) * stride_row + (k - 1) * stride_k + 1) * size_of(dtype)) {}

  void* data(DType dtype) const {
    return buffer.data<unsigned char>() + static_cast<std::size_t>(offset) * size_of(dtype);
  }

  std::int64_t offset;
  std::int64_t stride_row;
  std::int64_t stride_k;
  GuardedBuffer buffer;
};

// Fills the rows whose number modulo `period` is not `hole`; the others stay NaN.
__global__ void fill_kernel(void* data, std::int64_t rows, int k, std::int64_t stride_row,
                            std::int64_t stride_k, int period, int hole, DType dtype, Values values,
                            float scale, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < rows * k;
       i += gridDim.x * std::int64_t{256}) {
    if (i / k % period == hole) continue;
    store_value(data, i / k * stride_row + i % k * stride_k, dtype,
                random_value(values, scale, seed + i));
  }
}

__device__ double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGelu:
      return 0.5 * x * erfc(-x * 0.70710678118654752440);
    case Activation::kSilu:
      return x / (1 + exp(-x));
    case Activation::kSigmoid:
      return 1 / (1 + exp(-x));
    default:
      return x;
  }
}

__global__ void compare_kernel(LinearParams p, double unit_roundoff, bool is_exact, int* g_worst) {
  const std::int64_t count = std::int64_t{p.num_candidates} * p.m;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t b = i / p.m;
    const int m = static_cast<int>(i % p.m);
    const std::int64_t u = p.cand_to_user[b];
    double sum = p.bias != nullptr ? load_value(p.bias, m, p.dtype) : 0;
    double magnitude = fabs(sum);
    for (int k = 0; k < p.k_user; ++k) {
      const double product =
          load_value(p.w_user, m * p.stride_w_user_m + k * p.stride_w_user_k, p.dtype) *
          load_value(p.x_user, u * p.stride_x_user_u + k * p.stride_x_user_k, p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    for (int k = 0; k < p.k_cand; ++k) {
      const double product =
          load_value(p.w_cand, m * p.stride_w_cand_m + k * p.stride_w_cand_k, p.dtype) *
          load_value(p.x_cand, b * p.stride_x_cand_b + k * p.stride_x_cand_k, p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    const double got = load_value(p.out, i, p.dtype);
    const double expected = activated(p.activation, sum);
    if (isnan(expected)) {
      if (!isnan(got)) WorstExcess::report(g_worst, 1);
    } else if (is_exact) {
      if (got != rounded_value(static_cast<float>(expected), p.dtype)) {
        WorstExcess::report(g_worst, 1);
      }
    } else {
      // One rounding to the output type, fp32 sums whose error grows at worst like sqrt(K) here and
      // which no activation stretches by more than 1.13, and fp32 activations.
      const double budget =
          (unit_roundoff + 1e-6) * fabs(expected) + 1.13 * 8 * 5.97e-8 * magnitude + 1e-7;
      WorstExcess::report(g_worst, fabs(got - expected) - budget);
    }
  }
}

// Shuffled; with holes, only even users are named, and none of a group has the same number.
std::vector<std::int32_t> make_index(const LinearCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    const auto user =
        static_cast<std::int32_t>(b * static_cast<std::size_t>(c.num_users) / index.size());
    index[b] = c.holes == Holes::kRows ? user / 2 * 2 : user;
  }
  std::shuffle(index.begin(), index.end(), random);
  return index;
}

// Everything one case needs on the device.
struct LinearProblem {
  explicit LinearProblem(const LinearCase& c)
      : x_user(c.x_layout, c.num_users, c.k_user, c.dtype),
        x_cand(c.x_layout, c.num_candidates, c.k_cand, c.dtype),
        w_user(c.w_layout, c.m, c.k_user, c.dtype),
        w_cand(c.w_layout, c.m, c.k_cand, c.dtype),
        bias(Layout::kDense, 1, c.m, c.dtype),
        index(static_cast<std::size_t>(c.num_candidates) * 4),
        out(static_cast<std::size_t>(c.num_candidates) * c.m * size_of(c.dtype)) {
    const bool has_holes = c.holes == Holes::kRows;
    fill(c, x_user, c.num_users, c.k_user, has_holes ? 2 : 1, 1, 1.0f, 1);
    fill(c, x_cand, c.num_candidates, c.k_cand, has_holes ? 37 : 1, 2, 1.0f, 2);
    fill(c, w_user, c.m, c.k_user, 1, 1, 0.05f, 3);
    fill(c, w_cand, c.m, c.k_cand, has_holes ? 41 : 1, 3, 0.05f, 4);
    fill(c, bias, 1, c.m, 1, 1, 1.0f, 5);
    const std::vector<std::int32_t> host_index = make_index(c);
    IKBO_CUDA_CHECK(
        cudaMemcpy(index.data(), host_index.data(), index.bytes(), cudaMemcpyHostToDevice),
        "index");
    params = {.num_users = c.num_users,
              .num_candidates = c.num_candidates,
              .m = c.m,
              .k_user = c.k_user,
              .k_cand = c.k_cand,
              .dtype = c.dtype,
              .activation = c.activation,
              .x_user = x_user.data(c.dtype),
              .x_cand = x_cand.data(c.dtype),
              .w_user = w_user.data(c.dtype),
              .w_cand = w_cand.data(c.dtype),
              .bias = c.has_bias ? bias.data(c.dtype) : nullptr,
              .cand_to_user = index.data<std::int32_t>(),
              .out = out.data(),
              .stride_x_user_u = x_user.stride_row,
              .stride_x_user_k = x_user.stride_k,
              .stride_x_cand_b = x_cand.stride_row,
              .stride_x_cand_k = x_cand.stride_k,
              .stride_w_user_m = w_user.stride_row,
              .stride_w_user_k = w_user.stride_k,
              .stride_w_cand_m = w_cand.stride_row,
              .stride_w_cand_k = w_cand.stride_k};
  }

  static void fill(const LinearCase& c, const Matrix& matrix, int rows, int k, int period, int hole,
                   float scale, std::uint64_t seed) {
    fill_kernel<<<512, 256>>>(matrix.data(c.dtype), rows, k, matrix.stride_row, matrix.stride_k,
                              period, hole, c.dtype, c.values, scale, seed << 40);
  }

  std::vector<std::uint8_t> read_out() const {
    std::vector<std::uint8_t> bytes(out.bytes());
    IKBO_CUDA_CHECK(cudaMemcpy(bytes.data(), out.data(), bytes.size(), cudaMemcpyDeviceToHost),
                    "out");
    return bytes;
  }

  Matrix x_user, x_cand, w_user, w_cand, bias;
  GuardedBuffer index, out;
  LinearParams params;
};

LinearConfig make_config(const LinearCase& c, const LinearParams& params) {
  LinearConfig config = select_linear_config(params, query_device_limits(0));
  if (c.pinned.tile_rows != 0) config.user = config.candidate = c.pinned;
  return config;
}

float worst_excess(const LinearCase& c, const LinearParams& params) {
  const double unit_roundoff = c.dtype == DType::kFloat16    ? 1.0 / 2048
                               : c.dtype == DType::kBFloat16 ? 1.0 / 256
                                                             : 1.0 / 16777216;
  const WorstExcess worst;
  compare_kernel<<<2048, 256>>>(params, unit_roundoff, c.values == Values::kTernary,
                                worst.device());
  return worst.read();
}

class LinearTest : public testing::TestWithParam<LinearCase> {};

TEST_P(LinearTest, MatchesFp64Reference) {
  const LinearCase& c = GetParam();
  LinearProblem problem(c);
  const LinearConfig config = make_config(c, problem.params);
  const GuardedBuffer workspace(linear_workspace_bytes(problem.params, config));
  problem.params.workspace = workspace.data();
  linear(problem.params, config, query_device_limits(0), nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(config);
  EXPECT_EQ(worst_excess(c, problem.params), 0.0f) << to_string(config);
  EXPECT_TRUE(problem.out.guards_are_intact()) << to_string(config);
  EXPECT_TRUE(workspace.guards_are_intact()) << to_string(config);
}

std::vector<LinearTiling> all_tilings() {
  std::vector<LinearTiling> tilings;
  for (const int tile_m : {64, 128, 160, 192, 224, 256}) tilings.push_back({128, tile_m, 1});
  for (const int split_k : {1, 2, 4, 8}) tilings.push_back({64, 64, split_k});
  return tilings;
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
  LinearProblem problem(GetParam());
  const DeviceLimits limits = query_device_limits(0);
  const LinearConfig config = make_config(GetParam(), problem.params);
  const GuardedBuffer workspace(linear_workspace_bytes(problem.params, config));
  problem.params.workspace = workspace.data();
  const auto launch = [&](void* out) {
    problem.params.out = out;
    linear(problem.params, config, limits, nullptr);
  };
  EXPECT_EQ(first_difference(problem.out, workspace, launch), "") << to_string(config);
}

TEST_P(LinearRepeatTest, ReplaysInAGraph) {
  LinearProblem problem(GetParam());
  const DeviceLimits limits = query_device_limits(0);
  const LinearConfig config = make_config(GetParam(), problem.params);
  const GuardedBuffer workspace(linear_workspace_bytes(problem.params, config));
  problem.params.workspace = workspace.data();
  linear(problem.params, config, limits, nullptr);
  const std::vector<std::uint8_t> first = problem.read_out();

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  for (int i = 0; i < 3; ++i) linear(problem.params, config, limits, stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  problem.out.poison();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(first, problem.read_out()) << to_string(config);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_P(LinearRepeatTest, RunsOnTwoStreamsAtOnce) {
  LinearProblem problems[2] = {LinearProblem(GetParam()), LinearProblem(GetParam())};
  const DeviceLimits limits = query_device_limits(0);
  const LinearConfig config = make_config(GetParam(), problems[0].params);
  const std::size_t bytes = linear_workspace_bytes(problems[0].params, config);
  const GuardedBuffer workspaces[2] = {GuardedBuffer(bytes), GuardedBuffer(bytes)};
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    problems[i].params.workspace = workspaces[i].data();
    ASSERT_EQ(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), cudaSuccess);
  }
  linear(problems[0].params, config, limits, nullptr);
  const std::vector<std::uint8_t> first = problems[0].read_out();
  problems[0].out.poison();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 2; ++i) linear(problems[i].params, config, limits, streams[i]);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(first, problems[i].read_out()) << "stream " << i << " " << to_string(config);
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
