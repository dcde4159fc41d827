// SPDX-License-Identifier: Apache-2.0
// ikbo::lce on a GPU against an fp64 reference: every output element of every case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/lce.h"
#include "repeated_launches.cuh"
#include "two_streams.cuh"

namespace ikbo::test {
namespace {

enum class Order { kSorted, kShuffled, kAllOneUser };

struct LceCase {
  int num_users;
  int num_candidates;
  int m;
  int n;
  int k_user;
  int k_cand;
  DType dtype = DType::kFloat16;
  Order order = Order::kShuffled;
  Values values = Values::kNormal;
  int spare_rows = 0;  // rows of NaN after the K rows of each batch entry of E
  bool has_bias = true;
  bool transposed = false;  // E with K innermost: no kernel but the generic one takes it
  std::vector<int> list;    // K_i of a candidate side in parts; their sum is k_cand

  std::string id() const {
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_M" +
           std::to_string(m) + "_N" + std::to_string(n) + "_Ku" + std::to_string(k_user) + "_Kc" +
           std::to_string(k_cand) + "_" + std::string(name_of(dtype)) + "_o" +
           std::to_string(static_cast<int>(order)) + "_v" +
           std::to_string(static_cast<int>(values)) + "_s" + std::to_string(spare_rows) + "_b" +
           std::to_string(has_bias) + "_t" + std::to_string(transposed) + "_l" +
           std::to_string(list.size());
  }
};

__global__ void fill_kernel(void* data, std::int64_t count, DType dtype, Values values, float scale,
                            std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    store_value(data, i, dtype, random_value(values, scale, seed + i));
  }
}

__global__ void poison_rows_kernel(std::uint16_t* data, int batch, int k, int spare, int n) {
  const std::int64_t count = std::int64_t{batch} * spare * n;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t b = i / (spare * n);
    data[(b * (k + spare) + k) * n + i % (spare * n)] = 0xFFFF;
  }
}

__global__ void compare_kernel(LceParams p, double unit_roundoff, int* g_worst) {
  const std::int64_t count = std::int64_t{p.num_candidates} * p.m * p.n;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t b = i / (std::int64_t{p.m} * p.n);
    const int row = static_cast<int>(i / p.n % p.m);
    const int column = static_cast<int>(i % p.n);
    const std::int64_t u = p.cand_to_user[b];
    double sum = p.bias != nullptr ? load_value(p.bias, row, p.dtype) : 0;
    double magnitude = fabs(sum);
    for (int k = 0; k < p.k_user; ++k) {
      const double product =
          load_value(p.w_user, row * p.stride_w_user_m + k, p.dtype) *
          load_value(p.e_user,
                     u * p.stride_e_user_u + k * p.stride_e_user_k + column * p.stride_e_user_n,
                     p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    for (int k = 0; k < p.k_cand; ++k) {
      const double product =
          load_value(p.w_cand, row * p.stride_w_cand_m + k, p.dtype) *
          load_value(p.e_cand,
                     b * p.stride_e_cand_b + k * p.stride_e_cand_k + column * p.stride_e_cand_n,
                     p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    const double got = load_value(p.out, i, p.dtype);
    // One rounding to the output type, and fp32 sums whose error grows at worst like sqrt(K) here.
    const double budget = unit_roundoff * fabs(sum) + 8 * 5.97e-8 * magnitude + 1e-7;
    WorstExcess::report(g_worst, fabs(got - sum) - budget);
  }
}

std::vector<std::int32_t> make_index(const LceCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    index[b] =
        c.order == Order::kAllOneUser
            ? c.num_users - 1
            : static_cast<std::int32_t>(b * static_cast<std::size_t>(c.num_users) / index.size());
  }
  if (c.order == Order::kShuffled) std::shuffle(index.begin(), index.end(), random);
  return index;
}

// Everything one case needs on the device.
struct LceProblem {
  explicit LceProblem(const LceCase& c)
      : e_user(bytes(c, std::int64_t{c.num_users} * (c.k_user + c.spare_rows) * c.n)),
        e_cand(bytes(c, std::int64_t{c.num_candidates} * (c.k_cand + c.spare_rows) * c.n)),
        w_user(bytes(c, std::int64_t{c.m} * c.k_user)),
        w_cand(bytes(c, std::int64_t{c.m} * c.k_cand)),
        bias(bytes(c, c.m)),
        list(c.list.empty()
                 ? 0
                 : bytes(c, std::int64_t{c.num_candidates} *
                                (c.k_cand + kGapRows * static_cast<int>(c.list.size())) * c.n)),
        index(static_cast<std::size_t>(c.num_candidates) * 4),
        out(bytes(c, std::int64_t{c.num_candidates} * c.m * c.n)) {
    fill(c, e_user, 1.0f, 1);
    fill(c, e_cand, 1.0f, 2);
    fill(c, w_user, 0.05f, 3);
    fill(c, w_cand, 0.05f, 4);
    fill(c, bias, 1.0f, 5);
    if (c.spare_rows > 0) {
      poison_rows_kernel<<<256, 256>>>(e_user.data<std::uint16_t>(), c.num_users, c.k_user,
                                       c.spare_rows, c.n);
      poison_rows_kernel<<<256, 256>>>(e_cand.data<std::uint16_t>(), c.num_candidates, c.k_cand,
                                       c.spare_rows, c.n);
    }
    const std::vector<std::int32_t> host_index = make_index(c);
    IKBO_CUDA_CHECK(
        cudaMemcpy(index.data(), host_index.data(), index.bytes(), cudaMemcpyHostToDevice),
        "index");
    const std::int64_t ku = c.k_user + c.spare_rows;
    const std::int64_t kc = c.k_cand + c.spare_rows;
    params = {.num_users = c.num_users,
              .num_candidates = c.num_candidates,
              .m = c.m,
              .n = c.n,
              .k_user = c.k_user,
              .k_cand = c.k_cand,
              .dtype = c.dtype,
              .e_user = e_user.data(),
              .e_cand = e_cand.data(),
              .w_user = w_user.data(),
              .w_cand = w_cand.data(),
              .bias = c.has_bias ? bias.data() : nullptr,
              .cand_to_user = index.data<std::int32_t>(),
              .out = out.data(),
              .stride_e_user_u = ku * c.n,
              .stride_e_user_k = c.transposed ? 1 : c.n,
              .stride_e_user_n = c.transposed ? ku : 1,
              .stride_e_cand_b = kc * c.n,
              .stride_e_cand_k = c.transposed ? 1 : c.n,
              .stride_e_cand_n = c.transposed ? kc : 1,
              .stride_w_user_m = c.k_user,
              .stride_w_cand_m = c.k_cand};
    if (!c.list.empty()) make_list(c);
  }
  LceProblem(const LceProblem&) = delete;
  LceProblem& operator=(const LceProblem&) = delete;

  // The rows of e_cand once more, as parts that are slices of one tensor with rows of NaN between.
  void make_list(const LceCase& c) {
    const std::size_t row = static_cast<std::size_t>(c.n) * 2;
    const std::size_t entry = (c.k_cand + kGapRows * c.list.size()) * row;
    std::size_t from = 0;
    std::size_t to = 0;
    for (const int k : c.list) {
      IKBO_CUDA_CHECK(cudaMemcpy2D(list.data<char>() + to * row, entry,
                                   e_cand.data<char>() + from * row, params.stride_e_cand_b * 2,
                                   k * row, c.num_candidates, cudaMemcpyDeviceToDevice),
                      "list");
      parts.push_back({.e = list.data<char>() + to * row,
                       .k = k,
                       .stride_b = static_cast<std::int64_t>(entry / 2),
                       .stride_k = c.n});
      from += k;
      to += k + kGapRows;
    }
    params.cand_parts = parts.data();
    params.num_cand_parts = static_cast<std::int32_t>(parts.size());
  }

  static std::size_t bytes(const LceCase& c, std::int64_t count) {
    return static_cast<std::size_t>(count) * size_of(c.dtype);
  }
  static void fill(const LceCase& c, const GuardedBuffer& buffer, float scale, std::uint64_t seed) {
    fill_kernel<<<512, 256>>>(buffer.data(),
                              static_cast<std::int64_t>(buffer.bytes() / size_of(c.dtype)), c.dtype,
                              c.values, scale, seed << 40);
  }

  static constexpr int kGapRows = 2;
  GuardedBuffer e_user, e_cand, w_user, w_cand, bias, list, index, out;
  std::vector<LcePart> parts;
  LceParams params;
};

std::vector<std::uint16_t> read_back(const GuardedBuffer& buffer) {
  std::vector<std::uint16_t> values(buffer.bytes() / 2);
  IKBO_CUDA_CHECK(cudaMemcpy(values.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost),
                  "values");
  return values;
}

// A problem with the workspace of its calls.
struct LceRun {
  explicit LceRun(const LceCase& c, int num_sms = 0) : problem(c), limits(query_device_limits(0)) {
    if (num_sms > 0) limits.num_sms = num_sms;
    select();
  }
  void select() {
    config = select_lce_config(problem.params, limits);
    workspace.emplace(lce_workspace_bytes(problem.params, config));
    problem.params.workspace = workspace->data();
  }
  void operator()(cudaStream_t stream = nullptr) { lce(problem.params, config, limits, stream); }
  void poison() const { problem.out.poison(); }
  std::vector<std::uint16_t> result() {
    poison();
    (*this)();
    return read_back();
  }
  std::vector<std::uint16_t> read_back() const { return test::read_back(problem.out); }

  LceProblem problem;
  DeviceLimits limits;
  LceConfig config;
  std::optional<GuardedBuffer> workspace;
};

float worst_excess(const LceCase& c, const LceParams& params) {
  const WorstExcess worst;
  const double unit_roundoff = c.dtype == DType::kFloat16    ? 1.0 / 2048
                               : c.dtype == DType::kBFloat16 ? 1.0 / 256
                                                             : 1.0 / 16777216;
  // Ternary inputs: every sum is an integer that fp32 holds exactly, so only the last rounding
  // counts, and integers below 2048 (fp16) or 256 (bf16) come out exact.
  compare_kernel<<<2048, 256>>>(params, unit_roundoff, worst.device());
  return worst.read();
}

class LceTest : public testing::TestWithParam<LceCase> {};

TEST_P(LceTest, MatchesFp64Reference) {
  const LceCase& c = GetParam();
  LceRun run(c);
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  EXPECT_EQ(worst_excess(c, run.problem.params), 0.0f) << to_string(run.config);
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

TEST(LceDeterminism, LaunchesAreBitwiseEqual) {
  const LceCase one_candidate_a_user{
      .num_users = 210, .num_candidates = 201, .m = 433, .n = 256, .k_user = 118, .k_cand = 86};
  const LceCase few_tiles{
      .num_users = 3, .num_candidates = 8, .m = 433, .n = 256, .k_user = 1178, .k_cand = 866};
  for (const LceCase& c : {kMiddle, one_candidate_a_user, few_tiles}) {
    LceRun run(c);
    const auto launch = [&run](void* out) {
      run.problem.params.out = out;
      run();
    };
    EXPECT_EQ(first_difference(run.problem.out, *run.workspace, launch), "")
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
