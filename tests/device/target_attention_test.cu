// SPDX-License-Identifier: Apache-2.0
// ikbo::target_attention on a GPU against an fp64 reference: every output row of every case.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/target_attention_cuda.h"
#include "repeated_launches.cuh"
#include "two_streams.cuh"

namespace ikbo::test {
namespace {

enum class Order { kSorted, kShuffled };
enum class Lengths { kNone, kRagged, kRaggedAndPerCandidate };

struct AttentionCase {
  int num_users;
  int num_candidates;
  int num_queries = 1;
  int num_keys = 200;
  int num_heads = 2;
  int num_kv_heads = 2;
  int head_dim = 128;
  DType dtype = DType::kFloat16;
  Order order = Order::kShuffled;
  Lengths lengths = Lengths::kRagged;
  float logit_scale = 1.0f;  // of q
  int padding = 0;           // elements between the rows of a head, in q, k and v
  bool is_packed = false;    // histories one after the other

  std::string id() const {
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_Q" +
           std::to_string(num_queries) + "_S" + std::to_string(num_keys) + "_H" +
           std::to_string(num_heads) + "_G" + std::to_string(num_kv_heads) + "_D" +
           std::to_string(head_dim) + "_" + std::string(name_of(dtype)) + "_o" +
           std::to_string(static_cast<int>(order)) + "_l" +
           std::to_string(static_cast<int>(lengths)) + "_s" +
           std::to_string(static_cast<int>(logit_scale)) + "_p" + std::to_string(padding) +
           (is_packed ? "_packed" : "");
  }
};

__global__ void fill_kernel(void* data, std::int64_t count, DType dtype, float scale,
                            std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    store_value(data, i, dtype, random_value(Values::kNormal, scale, seed + i));
  }
}

struct Strides {
  std::int64_t of[4];
};
Strides on_device(const std::array<std::int64_t, 4>& s) { return {{s[0], s[1], s[2], s[3]}}; }

// Where a row of a user's history begins.
__device__ std::int64_t history_at(const TargetAttentionParams& p, const Strides& stride, int user,
                                   int key) {
  return p.user_offsets != nullptr ? (std::int64_t{p.user_offsets[user]} + key) * stride.of[1]
                                   : user * stride.of[0] + key * stride.of[1];
}

// NaN in what no candidate may read: keys and values that count for none, and gaps.
__global__ void poison_kernel(TargetAttentionParams p, std::uint16_t* data, Strides stride,
                              const std::int32_t* lengths, const std::int32_t* readable) {
  const std::int64_t row = stride.of[1];
  for (int user = blockIdx.x; user < p.num_users; user += gridDim.x) {
    for (std::int64_t i = threadIdx.x; i < lengths[user] * row; i += 256) {
      const int key = static_cast<int>(i / row);
      if (key >= readable[user] || i % stride.of[2] >= p.head_dim) {
        data[history_at(p, stride, user, key) + i % row] = 0xFFFF;
      }
    }
  }
}

// One thread per row: fp64 softmax attention. Logits are the sums of exact products.
__global__ void compare_kernel(TargetAttentionParams p, Strides stride_q, Strides stride_k,
                               Strides stride_v, double roundoff, int* g_out, int* g_lse) {
  const std::int64_t rows = std::int64_t{p.num_candidates} * p.num_queries * p.num_heads;
  const std::int64_t at = blockIdx.x * std::int64_t{128} + threadIdx.x;
  if (at >= rows) return;
  const int head = static_cast<int>(at % p.num_heads);
  const int query = static_cast<int>(at / p.num_heads % p.num_queries);
  const std::int64_t b = at / p.num_heads / p.num_queries;
  const std::int64_t user = p.cand_to_user[b];
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  int keys = p.user_lengths != nullptr ? p.user_lengths[user] : p.num_keys;
  if (p.user_offsets != nullptr) keys = p.user_offsets[user + 1] - p.user_offsets[user];
  if (p.cand_lengths != nullptr) keys = min(keys, p.cand_lengths[b]);
  const std::int64_t q = b * stride_q.of[0] + query * stride_q.of[1] + head * stride_q.of[2];
  const auto history = [&](const Strides& stride, int key) {
    return history_at(p, stride, static_cast<int>(user), key) + kv_head * stride.of[2];
  };
  double out[256] = {};
  double magnitude[256] = {};
  double max = -1e300;
  double sum = 0;
  for (int key = 0; key < keys; ++key) {
    const std::int64_t k = history(stride_k, key);
    double logit = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      logit += load_value(p.q, q + d, p.dtype) * load_value(p.k, k + d, p.dtype);
    }
    logit *= p.scale;
    const double rescale = logit > max ? exp(max - logit) : 1;
    max = fmax(max, logit);
    const double weight = exp(logit - max);
    sum = sum * rescale + weight;
    const std::int64_t v = history(stride_v, key);
    for (int d = 0; d < p.head_dim; ++d) {
      const double value = load_value(p.v, v + d, p.dtype);
      out[d] = out[d] * rescale + weight * value;
      magnitude[d] = magnitude[d] * rescale + weight * fabs(value);
    }
  }
  for (int d = 0; d < p.head_dim; ++d) {
    const double expected = keys == 0 ? 0 : out[d] / sum;
    const double got = load_value(p.out, at * p.head_dim + d, p.dtype);
    // The weights are rounded to the type of V, the output once more.
    const double budget =
        keys == 0 ? 0 : 1.05 * roundoff * (fabs(expected) + magnitude[d] / sum) + 1e-6;
    WorstExcess::report(g_out, fabs(got - expected) - budget);
  }
  const float lse =
      static_cast<const float*>(p.lse)[(b * p.num_heads + head) * p.num_queries + query];
  if (keys == 0) {
    WorstExcess::report(g_lse, lse == -INFINITY ? 0 : 1);
  } else {
    // Beside 1e-5, the rounding of the tensor cores' sums, which grows with the logits.
    WorstExcess::report(g_lse, fabs(lse - (max + log(sum))) - 1e-5 - 5e-7 * fabs(max));
  }
}

std::vector<std::int32_t> make_index(const AttentionCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    // Uneven: the square puts more candidates on the first users; some users have none.
    const double at = static_cast<double>(b) / static_cast<double>(index.size());
    index[b] = static_cast<std::int32_t>(at * at * c.num_users);
  }
  if (c.order == Order::kShuffled) std::shuffle(index.begin(), index.end(), random);
  return index;
}

std::vector<std::int32_t> make_lengths(int count, int num_keys, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(count));
  for (std::int32_t& length : lengths)
    length = static_cast<std::int32_t>(random() % (num_keys + 1));
  lengths.front() = num_keys;
  if (count > 1) lengths[1] = 0;
  if (count > 2) lengths[2] = 1;
  return lengths;
}

// How long each history is in memory.
std::vector<std::int32_t> history_lengths(const AttentionCase& c) {
  return c.is_packed && c.lengths != Lengths::kNone
             ? make_lengths(c.num_users, c.num_keys, 1)
             : std::vector<std::int32_t>(static_cast<std::size_t>(c.num_users), c.num_keys);
}

// How many keys count for any of a user's candidates.
std::vector<std::int32_t> readable_keys(const AttentionCase& c) {
  std::vector<std::int32_t> readable(static_cast<std::size_t>(c.num_users));
  const std::vector<std::int32_t> index = make_index(c);
  const std::vector<std::int32_t> of_users = make_lengths(c.num_users, c.num_keys, 1);
  const std::vector<std::int32_t> of_cands = make_lengths(c.num_candidates, c.num_keys, 2);
  for (std::size_t b = 0; b < index.size(); ++b) {
    const auto user = static_cast<std::size_t>(index[b]);
    std::int32_t keys = c.lengths == Lengths::kNone ? c.num_keys : of_users[user];
    if (c.lengths == Lengths::kRaggedAndPerCandidate) keys = std::min(keys, of_cands[b]);
    readable[user] = std::max(readable[user], keys);
  }
  return readable;
}

std::vector<std::int32_t> offsets_of(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> offsets{0};
  for (const std::int32_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

GuardedBuffer* copy_of(const std::vector<std::int32_t>& values) {
  auto* buffer = new GuardedBuffer(values.size() * 4);
  IKBO_CUDA_CHECK(
      cudaMemcpy(buffer->data(), values.data(), buffer->bytes(), cudaMemcpyHostToDevice), "values");
  return buffer;
}

struct AttentionProblem {
  explicit AttentionProblem(const AttentionCase& c)
      : row(c.head_dim + c.padding),
        q(std::size_t{2} * c.num_candidates * c.num_queries * c.num_heads * row),
        k(std::size_t{2} * c.num_users * c.num_keys * c.num_kv_heads * row),
        v(k.bytes()),
        out(std::size_t{2} * c.num_candidates * c.num_queries * c.num_heads * c.head_dim),
        lse(std::size_t{4} * c.num_candidates * c.num_queries * c.num_heads),
        index(copy_of(make_index(c))),
        user_lengths(copy_of(make_lengths(c.num_users, c.num_keys, 1))),
        cand_lengths(copy_of(make_lengths(c.num_candidates, c.num_keys, 2))),
        user_offsets(copy_of(offsets_of(history_lengths(c)))) {
    const std::int64_t q_row = c.num_heads * row;
    const std::int64_t k_row = c.num_kv_heads * row;
    params.num_users = c.num_users;
    params.num_candidates = c.num_candidates;
    params.num_queries = c.num_queries;
    params.num_keys = c.num_keys;
    params.num_heads = c.num_heads;
    params.num_kv_heads = c.num_kv_heads;
    params.head_dim = c.head_dim;
    params.dtype = c.dtype;
    params.scale = 1.0 / std::sqrt(c.head_dim);
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.stride_q = {c.num_queries * q_row, q_row, row, 1};
    params.stride_k = {c.num_keys * k_row, k_row, row, 1};
    params.stride_v = params.stride_k;
    params.cand_to_user = index->data<std::int32_t>();
    if (c.is_packed) {
      params.user_offsets = user_offsets->data<std::int32_t>();
      params.num_keys = offsets_of(history_lengths(c)).back();
    } else if (c.lengths != Lengths::kNone) {
      params.user_lengths = user_lengths->data<std::int32_t>();
    }
    if (c.lengths == Lengths::kRaggedAndPerCandidate) {
      params.cand_lengths = cand_lengths->data<std::int32_t>();
    }
    params.out = out.data();
    params.lse = lse.data();
    fill(q, c.dtype, c.logit_scale, 1);
    fill(k, c.dtype, 1.0f, 2);
    fill(v, c.dtype, 1.0f, 3);
    const std::unique_ptr<GuardedBuffer> lengths(copy_of(history_lengths(c)));
    const std::unique_ptr<GuardedBuffer> readable(copy_of(readable_keys(c)));
    for (const GuardedBuffer* buffer : {&k, &v}) {
      poison_kernel<<<512, 256>>>(params, buffer->data<std::uint16_t>(), on_device(params.stride_k),
                                  lengths->data<std::int32_t>(), readable->data<std::int32_t>());
    }
    IKBO_CUDA_CHECK(cudaDeviceSynchronize(), "poison");
  }

  static void fill(const GuardedBuffer& buffer, DType dtype, float scale, std::uint64_t seed) {
    fill_kernel<<<512, 256>>>(buffer.data(), static_cast<std::int64_t>(buffer.bytes() / 2), dtype,
                              scale, seed << 40);
  }

  std::int64_t row;
  GuardedBuffer q, k, v, out, lse;
  std::unique_ptr<GuardedBuffer> index, user_lengths, cand_lengths, user_offsets;
  TargetAttentionParams params;
};

struct AttentionRun {
  explicit AttentionRun(const AttentionCase& c, int num_sms = 0)
      : problem(c), limits(query_device_limits(0)) {
    if (num_sms > 0) limits.num_sms = num_sms;
    config = select_target_attention_cuda_config(problem.params, limits);
    workspace.emplace(target_attention_workspace_bytes(problem.params, config));
  }
  void operator()(cudaStream_t stream = nullptr) {
    target_attention(problem.params, config, limits, workspace->data(), stream);
  }
  void poison() const {
    problem.out.poison();
    problem.lse.poison();
  }
  std::vector<std::uint32_t> result() {
    poison();
    workspace->poison();
    (*this)();
    return read_back();
  }
  // The output's bits, then those of the log-sum-exp.
  std::vector<std::uint32_t> read_back() const {
    std::vector<std::uint32_t> values((problem.out.bytes() + problem.lse.bytes()) / 4);
    IKBO_CUDA_CHECK(
        cudaMemcpy(values.data(), problem.out.data(), problem.out.bytes(), cudaMemcpyDeviceToHost),
        "out");
    IKBO_CUDA_CHECK(cudaMemcpy(values.data() + problem.out.bytes() / 4, problem.lse.data(),
                               problem.lse.bytes(), cudaMemcpyDeviceToHost),
                    "lse");
    return values;
  }

  AttentionProblem problem;
  DeviceLimits limits;
  TargetAttentionCudaConfig config;
  std::optional<GuardedBuffer> workspace;
};

void check_against_reference(const AttentionCase& c) {
  AttentionRun run(c);
  ASSERT_EQ(run.config.kernel, TargetAttentionKernel::kSm90);
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  const WorstExcess worst_out;
  const WorstExcess worst_lse;
  const std::int64_t rows = std::int64_t{c.num_candidates} * c.num_queries * c.num_heads;
  const TargetAttentionParams& p = run.problem.params;
  compare_kernel<<<static_cast<unsigned>((rows + 127) / 128), 128>>>(
      p, on_device(p.stride_q), on_device(p.stride_k), on_device(p.stride_v),
      c.dtype == DType::kFloat16 ? 1.0 / 2048 : 1.0 / 256, worst_out.device(), worst_lse.device());
  EXPECT_EQ(worst_out.read(), 0.0f) << to_string(run.config);
  EXPECT_EQ(worst_lse.read(), 0.0f) << to_string(run.config);
  EXPECT_TRUE(run.problem.out.guards_are_intact());
  EXPECT_TRUE(run.problem.lse.guards_are_intact());
  EXPECT_TRUE(run.workspace->guards_are_intact());
}

class AttentionTest : public testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionTest, MatchesFp64Reference) { check_against_reference(GetParam()); }

// function size waiver: a table of cases, one field a line.
std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> all;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int d : {32, 64, 96, 128, 192, 256, 8, 40, 72, 248}) {
      all.push_back({.num_users = 5, .num_candidates = 70, .head_dim = d, .dtype = dtype});
    }
    for (const int s : {1, 15, 127, 128, 129, 511, 512, 1500}) {
      all.push_back({.num_users = 4, .num_candidates = 90, .num_keys = s, .dtype = dtype});
      all.push_back({.num_users = 1,
                     .num_candidates = 3,
                     .num_keys = s,
                     .head_dim = 64,
                     .dtype = dtype,
                     .lengths = Lengths::kNone});
    }
  }
  for (const int q : {1, 2, 7, 8, 32, 48, 64, 128, 300}) {
    all.push_back({.num_users = 6,
                   .num_candidates = 33,
                   .num_queries = q,
                   .num_keys = 300,
                   .lengths = q % 2 == 0 ? Lengths::kRagged : Lengths::kRaggedAndPerCandidate});
  }
  for (const int b : {1, 2, 63, 64, 65, 128, 129, 3000}) {
    all.push_back({.num_users = std::min(b, 40), .num_candidates = b, .head_dim = 64});
  }
  // Heads that share a kv head; users without candidates; more users than candidates.
  all.push_back({.num_users = 7, .num_candidates = 50, .num_queries = 3, .num_heads = 8});
  all.push_back(
      {.num_users = 7, .num_candidates = 50, .num_queries = 5, .num_heads = 6, .num_kv_heads = 1});
  all.push_back({.num_users = 3000,
                 .num_candidates = 500,
                 .num_keys = 40,
                 .num_heads = 1,
                 .num_kv_heads = 1});
  // More users or candidates than a CTA groups by itself.
  for (const Lengths lengths : {Lengths::kNone, Lengths::kRaggedAndPerCandidate}) {
    all.push_back({.num_users = lengths == Lengths::kNone ? 600 : 300,
                   .num_candidates = 900,
                   .num_keys = 150,
                   .lengths = lengths});
    all.push_back({.num_users = 11,
                   .num_candidates = 9000,
                   .num_keys = 150,
                   .num_heads = 1,
                   .num_kv_heads = 1,
                   .head_dim = 64,
                   .lengths = lengths});
  }
  // As many as it does group.
  all.push_back({.num_users = 512,
                 .num_candidates = 8192,
                 .num_keys = 40,
                 .num_heads = 1,
                 .num_kv_heads = 1,
                 .lengths = Lengths::kNone});
  all.push_back({.num_users = 256, .num_candidates = 1000, .num_keys = 300, .head_dim = 64});
  all.push_back({.num_users = 9,
                 .num_candidates = 200,
                 .num_keys = 400,
                 .lengths = Lengths::kRaggedAndPerCandidate,
                 .padding = 8});
  for (const float scale : {8.0f, 20.0f}) {
    all.push_back({.num_users = 4, .num_candidates = 90, .num_keys = 600, .logit_scale = scale});
  }
  for (const int d : {32, 40, 128, 256}) {
    for (const Lengths lengths :
         {Lengths::kNone, Lengths::kRagged, Lengths::kRaggedAndPerCandidate}) {
      all.push_back({.num_users = 9,
                     .num_candidates = 100,
                     .num_queries = d == 32 ? 16 : 3,
                     .num_keys = 333,
                     .head_dim = d,
                     .lengths = lengths,
                     .padding = d == 32 ? 8 : 0,
                     .is_packed = true});
    }
  }
  return all;
}

// Few rows and long histories: the keys are split over CTAs.
std::vector<AttentionCase> split_cases() {
  std::vector<AttentionCase> all;
  for (const int d : {32, 72, 128, 192, 256}) {
    for (const Lengths lengths :
         {Lengths::kNone, Lengths::kRagged, Lengths::kRaggedAndPerCandidate}) {
      all.push_back({.num_users = 4,
                     .num_candidates = 7,
                     .num_queries = d == 32 ? 16 : 3,
                     .num_keys = 4000,
                     .num_heads = 4,
                     .head_dim = d,
                     .lengths = lengths});
    }
  }
  all.push_back({.num_users = 1,
                 .num_candidates = 1,
                 .num_keys = 16384,
                 .num_heads = 1,
                 .num_kv_heads = 1,
                 .dtype = DType::kBFloat16,
                 .lengths = Lengths::kNone});
  all.push_back({.num_users = 1,
                 .num_candidates = 64,
                 .num_keys = 9999,
                 .head_dim = 64,
                 .lengths = Lengths::kNone,
                 .logit_scale = 20.0f});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.id(); });

class SplitAttentionTest : public AttentionTest {};

TEST_P(SplitAttentionTest, MatchesFp64Reference) {
  EXPECT_GT(AttentionRun(GetParam()).config.num_splits, 1);
  check_against_reference(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Shapes, SplitAttentionTest, testing::ValuesIn(split_cases()),
                         [](const auto& info) { return info.param.id(); });

// For tools that make a kernel a hundred times slower.
std::vector<AttentionCase> small_cases() {
  return {{.num_users = 3, .num_candidates = 40, .num_queries = 5, .num_keys = 150},
          {.num_users = 3,
           .num_candidates = 9,
           .num_keys = 300,
           .head_dim = 64,
           .dtype = DType::kBFloat16,
           .lengths = Lengths::kRaggedAndPerCandidate},
          {.num_users = 2, .num_candidates = 5, .num_keys = 70, .head_dim = 256},
          {.num_users = 3,
           .num_candidates = 9,
           .num_keys = 150,
           .lengths = Lengths::kRaggedAndPerCandidate,
           .is_packed = true},
          {.num_users = 1, .num_candidates = 2, .num_keys = 1500, .head_dim = 32},
          {.num_users = 300, .num_candidates = 40, .num_keys = 100}};
}

INSTANTIATE_TEST_SUITE_P(Small, AttentionTest, testing::ValuesIn(small_cases()),
                         [](const auto& info) { return info.param.id(); });

const AttentionCase kMiddle{
    .num_users = 15, .num_candidates = 257, .num_queries = 20, .num_keys = 700};

TEST(AttentionDeterminism, LaunchesAreBitwiseEqual) {
  AttentionRun run(kMiddle);
  TargetAttentionParams& p = run.problem.params;
  const auto launch_into = [&](void* out, void* lse) {
    p.out = out;
    p.lse = lse;
    run();
  };
  const GuardedBuffer& out = run.problem.out;
  const GuardedBuffer& lse = run.problem.lse;
  EXPECT_EQ(first_difference(out, *run.workspace, [&](void* to) { launch_into(to, lse.data()); }),
            "");
  EXPECT_EQ(first_difference(lse, *run.workspace, [&](void* to) { launch_into(out.data(), to); }),
            "");
}

TEST(AttentionDeterminism, ResultsDoNotDependOnTheSharingOfWork) {
  AttentionRun run(kMiddle);
  const std::vector<std::uint32_t> all = run.result();
  for (const int num_sms : {1, 7, 66}) {
    AttentionRun narrow(kMiddle, num_sms);
    EXPECT_EQ(all, narrow.result()) << num_sms << " multiprocessors";
  }
}

TEST(AttentionDeterminism, CandidatesDoNotDependOnTheirBatch) {
  AttentionRun run(kMiddle);
  const std::vector<std::uint32_t> all = run.result();
  // The last 100 candidates alone, with all users.
  constexpr int kFew = 100;
  const int skipped = kMiddle.num_candidates - kFew;
  TargetAttentionParams& p = run.problem.params;
  p.q = static_cast<const std::uint16_t*>(p.q) + skipped * p.stride_q[0];
  p.cand_to_user += skipped;
  p.num_candidates = kFew;
  const std::vector<std::uint32_t> few = run.result();
  const std::size_t size =
      static_cast<std::size_t>(kMiddle.num_queries) * kMiddle.num_heads * kMiddle.head_dim / 2;
  EXPECT_TRUE(std::equal(few.begin(), few.begin() + kFew * size, all.begin() + skipped * size));
}

TEST(AttentionStreams, TwoStreamsAndAGraphAtOnce) {
  AttentionRun one(kMiddle);
  AttentionRun two({.num_users = 30, .num_candidates = 300, .num_keys = 100, .head_dim = 64});
  expect_no_change_by_the_other(one, two);
}

}  // namespace
}  // namespace ikbo::test
