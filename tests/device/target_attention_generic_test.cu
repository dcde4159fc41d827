// SPDX-License-Identifier: Apache-2.0
// The generic kernel of ikbo::target_attention on a GPU against an fp64 reference, every output
// row: each layout that operands may have, every type, head width and kind of mask. Memory that no
// candidate may read holds NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ikbo/target_attention_cuda.h"
#include "target_attention_generic_inputs.cuh"

namespace ikbo::test {
namespace {

struct Strides {
  std::int64_t of[4];
};
Strides on_device(const std::array<std::int64_t, 4>& s) { return {{s[0], s[1], s[2], s[3]}}; }

// One thread per row of the candidates from `first_cand` on: fp64 softmax attention. Logits are the
// sums of exact products.
__global__ void compare_kernel(TargetAttentionParams p, int first_cand, Strides stride_q,
                               Strides stride_k, Strides stride_v, double roundoff, int* g_out,
                               int* g_lse) {
  const std::int64_t rows = std::int64_t{p.num_candidates} * p.num_queries * p.num_heads;
  const std::int64_t at = std::int64_t{first_cand} * p.num_queries * p.num_heads +
                          blockIdx.x * std::int64_t{128} + threadIdx.x;
  if (at >= rows) return;
  const int head = static_cast<int>(at % p.num_heads);
  const int query = static_cast<int>(at / p.num_heads % p.num_queries);
  const std::int64_t b = at / p.num_heads / p.num_queries;
  const std::int64_t user = p.cand_to_user[b];
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  int keys = p.user_lengths != nullptr ? p.user_lengths[user] : p.num_keys;
  if (p.user_offsets != nullptr) keys = p.user_offsets[user + 1] - p.user_offsets[user];
  if (p.cand_lengths != nullptr) keys = min(keys, p.cand_lengths[b]);
  const auto history = [&](const Strides& s, int key) {
    const std::int64_t row = p.user_offsets != nullptr
                                 ? (std::int64_t{p.user_offsets[user]} + key) * s.of[1]
                                 : user * s.of[0] + key * s.of[1];
    return row + kv_head * s.of[2];
  };
  const std::int64_t q = b * stride_q.of[0] + query * stride_q.of[1] + head * stride_q.of[2];
  double out[256] = {};
  double magnitude[256] = {};
  double max = -1e300;
  double sum = 0;
  for (int key = 0; key < keys; ++key) {
    if (p.user_mask != nullptr && !p.user_mask[user * p.num_keys + key]) continue;
    double logit = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      logit += load_value(p.q, q + d * stride_q.of[3], p.dtype) *
               load_value(p.k, history(stride_k, key) + d * stride_k.of[3], p.dtype);
    }
    logit *= p.scale;
    const double rescale = logit > max ? exp(max - logit) : 1;
    max = fmax(max, logit);
    const double weight = exp(logit - max);
    sum = sum * rescale + weight;
    for (int d = 0; d < p.head_dim; ++d) {
      const double value = load_value(p.v, history(stride_v, key) + d * stride_v.of[3], p.dtype);
      out[d] = out[d] * rescale + weight * value;
      magnitude[d] = magnitude[d] * rescale + weight * fabs(value);
    }
  }
  const bool has_keys = sum > 0;
  // Roundings of a logit's sum in fp32, which 16-bit types round more coarsely afterwards.
  const double of_logits = 5e-7 * (4 + fabs(max));
  for (int d = 0; d < p.head_dim; ++d) {
    const double expected = has_keys ? out[d] / sum : 0;
    const double got = load_value(p.out, at * p.head_dim + d, p.dtype);
    // The weights are rounded to the type of V, the output once more.
    const double spread = has_keys ? magnitude[d] / sum : 0;
    const double budget =
        has_keys ? 1.05 * roundoff * (fabs(expected) + spread) + of_logits * spread + 1e-6 : 0;
    WorstExcess::report(g_out, fabs(got - expected) - budget);
  }
  const float lse =
      static_cast<const float*>(p.lse)[(b * p.num_heads + head) * p.num_queries + query];
  const double expected = has_keys ? max + log(sum) : 0;
  WorstExcess::report(g_lse,
                      has_keys ? fabs(lse - expected) - 1e-5 - 5e-7 * fabs(max) : lse != -INFINITY);
}

struct GenericRun {
  explicit GenericRun(const GenericCase& c)
      : host(c),
        index(copy_of(host.index)),
        user_lengths(copy_of(host.user_lengths)),
        cand_lengths(copy_of(host.cand_lengths)),
        user_offsets(copy_of(host.user_offsets)),
        mask(copy_of(host.mask)),
        is_read(copy_of(host.is_read)),
        q({c.num_candidates, c.num_queries, c.num_heads, c.head_dim}, c, nullptr, 1),
        k(history_sizes(c, host), c, is_read->data<std::uint8_t>(), 2),
        v(history_sizes(c, host), c, is_read->data<std::uint8_t>(), 3),
        out(size_of(c.dtype) * c.num_candidates * c.num_queries * c.num_heads * c.head_dim),
        lse(sizeof(float) * c.num_candidates * c.num_queries * c.num_heads) {
    params.num_users = c.num_users;
    params.num_candidates = c.num_candidates;
    params.num_queries = c.num_queries;
    params.num_keys = c.is_packed ? static_cast<std::int32_t>(host.is_read.size()) : c.num_keys;
    params.num_heads = c.num_heads;
    params.num_kv_heads = c.num_kv_heads;
    params.head_dim = c.head_dim;
    params.dtype = c.dtype;
    params.scale = c.scale;
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.stride_q = q.strides();
    params.stride_k = k.strides();
    params.stride_v = v.strides();
    params.cand_to_user = index->data<std::int32_t>();
    if (c.is_packed) {
      params.user_offsets = user_offsets->data<std::int32_t>();
    } else if (c.has_user_lengths) {
      params.user_lengths = user_lengths->data<std::int32_t>();
    }
    if (c.has_cand_lengths) params.cand_lengths = cand_lengths->data<std::int32_t>();
    if (c.has_mask) params.user_mask = mask->data<bool>();
    params.out = out.data();
    params.lse = lse.data();
    // The oldest architecture has no other kernel.
    limits = {.compute_capability = 80, .num_sms = query_device_limits(0).num_sms};
    config = select_target_attention_cuda_config(params, limits);
    workspace.emplace(target_attention_workspace_bytes(params, config));
  }

  void operator()(cudaStream_t stream = nullptr) {
    target_attention(params, config, limits, workspace->data(), stream);
  }
  std::vector<std::uint16_t> result() {
    out.poison();
    lse.poison();
    workspace->poison();
    (*this)();
    return read_back();
  }
  // The output's bits, then those of the log-sum-exp.
  std::vector<std::uint16_t> read_back() const {
    std::vector<std::uint16_t> values((out.bytes() + lse.bytes()) / 2);
    IKBO_CUDA_CHECK(cudaMemcpy(values.data(), out.data(), out.bytes(), cudaMemcpyDeviceToHost),
                    "out");
    IKBO_CUDA_CHECK(cudaMemcpy(values.data() + out.bytes() / 2, lse.data(), lse.bytes(),
                               cudaMemcpyDeviceToHost),
                    "lse");
    return values;
  }

  HostInputs host;
  std::unique_ptr<GuardedBuffer> index, user_lengths, cand_lengths, user_offsets, mask, is_read;
  OperandMemory q, k, v;
  GuardedBuffer out, lse;
  TargetAttentionParams params;
  DeviceLimits limits;
  TargetAttentionCudaConfig config;
  std::optional<GuardedBuffer> workspace;
};

void check_against_reference(GenericRun& run, int first_cand = 0) {
  ASSERT_EQ(run.config.kernel, TargetAttentionKernel::kGeneric);
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  const WorstExcess worst_out;
  const WorstExcess worst_lse;
  const TargetAttentionParams& p = run.params;
  const double roundoff = p.dtype == DType::kFloat16    ? 1.0 / 2048
                          : p.dtype == DType::kBFloat16 ? 1.0 / 256
                                                        : 1.0 / (1 << 24);
  const std::int64_t rows =
      std::int64_t{p.num_candidates - first_cand} * p.num_queries * p.num_heads;
  compare_kernel<<<static_cast<unsigned>((rows + 127) / 128), 128>>>(
      p, first_cand, on_device(p.stride_q), on_device(p.stride_k), on_device(p.stride_v), roundoff,
      worst_out.device(), worst_lse.device());
  EXPECT_EQ(worst_out.read(), 0.0f) << to_string(run.config);
  EXPECT_EQ(worst_lse.read(), 0.0f) << to_string(run.config);
  EXPECT_TRUE(run.out.guards_are_intact()) << to_string(run.config);
  EXPECT_TRUE(run.lse.guards_are_intact()) << to_string(run.config);
  EXPECT_TRUE(run.workspace->guards_are_intact()) << to_string(run.config);
}

class AttentionGenericTest : public testing::TestWithParam<GenericCase> {};

TEST_P(AttentionGenericTest, MatchesFp64Reference) {
  GenericRun run(GetParam());
  check_against_reference(run);
}

constexpr std::array kDtypes{DType::kFloat16, DType::kBFloat16, DType::kFloat32};

std::string name_of_case(const testing::TestParamInfo<GenericCase>& info) {
  return info.param.id();
}

// Every layout with every kind of mask, in every type, and heads that share a kv head.
std::vector<GenericCase> layout_cases() {
  constexpr std::array kHeadDims{33, 64, 100, 128, 7, 256, 72, 190};
  std::vector<GenericCase> all;
  std::size_t n = 0;
  for (const DType dtype : kDtypes) {
    for (std::size_t layout = 0; layout < kLayoutNames.size(); ++layout) {
      for (const bool is_packed : {false, true}) {
        for (int masks = 0; masks < (is_packed ? 4 : 8); ++masks, ++n) {
          all.push_back({.num_users = 7,
                         .num_candidates = 60,
                         .num_queries = 3,
                         .num_keys = n % 2 == 0 ? 150 : 77,
                         .num_heads = n % 3 == 0 ? 6 : 2,
                         .num_kv_heads = n % 3 == 0 ? 2 : 1 + static_cast<int>(n % 2),
                         .head_dim = kHeadDims[n % kHeadDims.size()],
                         .dtype = dtype,
                         .layout = static_cast<Layout>(layout),
                         .has_user_lengths = masks % 2 != 0,
                         .has_cand_lengths = masks / 2 % 2 != 0,
                         .has_mask = masks / 4 != 0,
                         .is_packed = is_packed,
                         .scale = 0.1});
        }
      }
    }
  }
  return all;
}

// function size waiver: a table of cases, one field a line.
std::vector<GenericCase> size_cases() {
  std::vector<GenericCase> all;
  for (const DType dtype : kDtypes) {
    for (const int d : {1,  2,  8,   15,  16,  17,  31,  32,  33,  48,  63,  65,
                        96, 97, 127, 128, 129, 144, 191, 192, 193, 240, 255, 256}) {
      all.push_back({.num_users = 4,
                     .num_candidates = 50,
                     .num_keys = 90,
                     .head_dim = d,
                     .dtype = dtype,
                     .scale = 1.0 / std::sqrt(d)});
    }
    for (const int s : {0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 1500}) {
      all.push_back({.num_users = 4,
                     .num_candidates = 90,
                     .num_keys = s,
                     .dtype = dtype,
                     .has_cand_lengths = s % 2 != 0});
    }
    for (const int q : {1, 2, 7, 15, 16, 17, 63, 64, 65, 300, 512}) {
      all.push_back({.num_users = 5,
                     .num_candidates = 13,
                     .num_queries = q,
                     .head_dim = 40,
                     .dtype = dtype,
                     .has_cand_lengths = true,
                     .has_mask = q % 2 == 0});
    }
    for (const int b : {1, 2, 63, 64, 65, 3000}) {
      all.push_back({.num_users = std::min(b, 40), .num_candidates = b, .dtype = dtype});
    }
    // More users than candidates, and than the grouping has room for in shared memory.
    for (const int users : {3000, 5633, 9000}) {
      all.push_back({.num_users = users,
                     .num_candidates = 500,
                     .num_keys = 40,
                     .num_heads = 1,
                     .num_kv_heads = 1,
                     .head_dim = 20,
                     .dtype = dtype,
                     .has_cand_lengths = users != 3000});
    }
    for (const double scale : {0.0, -0.3, 1.0, -4.0}) {
      all.push_back({.num_users = 4,
                     .num_candidates = 90,
                     .num_keys = 600,
                     .dtype = dtype,
                     .has_mask = true,
                     .scale = scale});
    }
  }
  return all;
}

// Few rows and long histories: the keys are split over CTAs.
std::vector<GenericCase> split_cases() {
  std::vector<GenericCase> all;
  for (const DType dtype : kDtypes) {
    for (const int d : {1, 33, 64, 128, 192, 255}) {
      all.push_back({.num_users = 4,
                     .num_candidates = 7,
                     .num_queries = 3,
                     .num_keys = 4000,
                     .num_heads = 4,
                     .head_dim = d,
                     .dtype = dtype,
                     .has_user_lengths = d % 2 == 0,
                     .has_cand_lengths = d != 64,
                     .has_mask = d % 3 == 0,
                     .scale = 1.0 / std::sqrt(d)});
    }
    all.push_back({.num_users = 1,
                   .num_candidates = 1,
                   .num_keys = 16384,
                   .num_heads = 1,
                   .num_kv_heads = 1,
                   .dtype = dtype,
                   .has_user_lengths = false,
                   .scale = -0.1});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Layouts, AttentionGenericTest, testing::ValuesIn(layout_cases()),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Sizes, AttentionGenericTest, testing::ValuesIn(size_cases()),
                         name_of_case);

class SplitAttentionGenericTest : public AttentionGenericTest {};

TEST_P(SplitAttentionGenericTest, MatchesFp64Reference) {
  GenericRun run(GetParam());
  EXPECT_GT(run.config.num_splits, 1);
  check_against_reference(run);
}

INSTANTIATE_TEST_SUITE_P(Splits, SplitAttentionGenericTest, testing::ValuesIn(split_cases()),
                         name_of_case);

// For tools that make a kernel a hundred times slower.
std::vector<GenericCase> small_cases() {
  std::vector<GenericCase> all;
  for (const DType dtype : kDtypes) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPaddedOdd, Layout::kPaddedEven}) {
      all.push_back({.num_users = 3,
                     .num_candidates = 9,
                     .num_queries = 5,
                     .num_keys = 150,
                     .head_dim = layout == Layout::kContiguous ? 40 : 130,
                     .dtype = dtype,
                     .layout = layout,
                     .has_cand_lengths = layout != Layout::kContiguous,
                     .has_mask = layout == Layout::kPaddedOdd,
                     .is_packed = layout == Layout::kPaddedEven});
    }
  }
  all.push_back({.num_users = 1, .num_candidates = 2, .num_keys = 1500, .head_dim = 20});
  all.push_back({.num_users = 5700, .num_candidates = 20, .num_keys = 10, .head_dim = 8});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Small, AttentionGenericTest, testing::ValuesIn(small_cases()),
                         name_of_case);

// Offsets beyond 2^31 elements, in the histories, and in the candidates and the result.
TEST(AttentionGenericOffsets, Of64Bits) {
  GenericCase histories{.num_users = 40, .num_candidates = 100, .num_keys = 75000, .num_heads = 8};
  histories.num_kv_heads = 8;
  histories.head_dim = 96;
  histories.longest = 300;
  GenericCase candidates{.num_users = 9, .num_candidates = 70000, .num_queries = 16};
  candidates.num_keys = 20;
  candidates.num_heads = 8;
  candidates.num_kv_heads = 4;
  candidates.head_dim = 248;
  for (const GenericCase& sizes : {histories, candidates}) {
    for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
      GenericCase c = sizes;
      c.dtype = dtype;
      std::size_t free = 0;
      std::size_t total = 0;
      IKBO_CUDA_CHECK(cudaMemGetInfo(&free, &total), "memory");
      const std::size_t needed = size_of(dtype) * (std::size_t{5} << 30);
      if (free < needed) GTEST_SKIP() << "needs " << needed << " free bytes; " << free << " are";
      GenericRun run(c);
      ASSERT_GT(std::max((c.num_users - 1) * run.params.stride_k[0],
                         (c.num_candidates - 100) * run.params.stride_q[0]),
                std::int64_t{1} << 31);
      check_against_reference(run, c.num_candidates - 100);
    }
  }
}

const GenericCase kVectors{
    .num_users = 15, .num_candidates = 257, .num_queries = 20, .num_keys = 700, .head_dim = 96};
const GenericCase kElements{.num_users = 15,
                            .num_candidates = 257,
                            .num_queries = 20,
                            .num_keys = 300,
                            .head_dim = 131,
                            .dtype = DType::kBFloat16,
                            .layout = Layout::kShifted,
                            .has_cand_lengths = true,
                            .has_mask = true};
const GenericCase kSingle{.num_users = 15,
                          .num_candidates = 257,
                          .num_queries = 20,
                          .num_keys = 300,
                          .dtype = DType::kFloat32,
                          .has_cand_lengths = true};

class AttentionGenericEveryWay : public testing::TestWithParam<GenericCase> {};
INSTANTIATE_TEST_SUITE_P(Middle, AttentionGenericEveryWay,
                         testing::Values(kVectors, kElements, kSingle), name_of_case);

TEST_P(AttentionGenericEveryWay, LaunchesAreBitwiseEqual) {
  GenericRun run(GetParam());
  const std::vector<std::uint16_t> first = run.result();
  for (int round = 0; round < 10; ++round) {
    run.out.poison();
    for (int i = 0; i < 20; ++i) run();
    ASSERT_EQ(first, run.read_back()) << "round " << round;
  }
}

TEST_P(AttentionGenericEveryWay, ResultsDoNotDependOnTheSharingOfWork) {
  GenericRun run(GetParam());
  ASSERT_EQ(run.config.num_splits, 1);
  const std::vector<std::uint16_t> all = run.result();
  for (const int num_sms : {1, 7, 66}) {
    run.limits.num_sms = num_sms;
    EXPECT_EQ(all, run.result()) << num_sms << " multiprocessors";
  }
}

// Each second candidate alone: other tiles, other mates.
TEST_P(AttentionGenericEveryWay, CandidatesDoNotDependOnTheirBatch) {
  const GenericCase& c = GetParam();
  GenericRun run(c);
  const std::vector<std::uint16_t> all = run.result();
  TargetAttentionParams& p = run.params;
  const TargetAttentionParams whole = p;
  std::vector<std::int32_t> index;
  std::vector<std::int32_t> lengths;
  for (int b = 0; b < c.num_candidates; b += 2) {
    index.push_back(run.host.index[static_cast<std::size_t>(b)]);
    lengths.push_back(run.host.cand_lengths[static_cast<std::size_t>(b)]);
  }
  const auto few_index = copy_of(index);
  const auto few_lengths = copy_of(lengths);
  p.cand_to_user = few_index->data<std::int32_t>();
  if (c.has_cand_lengths) p.cand_lengths = few_lengths->data<std::int32_t>();
  p.stride_q[0] *= 2;
  p.num_candidates = static_cast<std::int32_t>(index.size());
  const std::vector<std::uint16_t> few = run.result();
  const std::size_t row =
      std::size_t(whole.num_queries) * whole.num_heads * whole.head_dim * size_of(c.dtype) / 2;
  for (std::size_t b = 0; b < index.size(); ++b) {
    ASSERT_TRUE(
        std::equal(few.begin() + b * row, few.begin() + (b + 1) * row, all.begin() + 2 * b * row))
        << "candidate " << b;
  }
}

TEST_P(AttentionGenericEveryWay, ReplaysInAGraph) {
  GenericRun run(GetParam());
  const std::vector<std::uint16_t> expected = run.result();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  IKBO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  IKBO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  run(stream);
  IKBO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph), "capture");
  IKBO_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0), "graph");
  run.out.poison();
  IKBO_CUDA_CHECK(cudaDeviceSynchronize(), "poison");
  for (int i = 0; i < 10; ++i) IKBO_CUDA_CHECK(cudaGraphLaunch(replay, stream), "replay");
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(expected, run.read_back());
  IKBO_CUDA_CHECK(cudaGraphExecDestroy(replay), "graph");
  IKBO_CUDA_CHECK(cudaGraphDestroy(graph), "graph");
  IKBO_CUDA_CHECK(cudaStreamDestroy(stream), "stream");
}

}  // namespace
}  // namespace ikbo::test
