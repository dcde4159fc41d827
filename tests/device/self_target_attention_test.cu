// SPDX-License-Identifier: Apache-2.0
// ikbo::self_target_attention on a GPU against an fp64 reference: every row of both outputs of
// every case; and bit by bit against ikbo::target_attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/self_target_attention_cuda.h"
#include "two_streams.cuh"

namespace ikbo::test {
namespace {

enum class Lengths { kNone, kUsers, kCandidates, kBoth };
enum class Own { kFull, kCausal };

struct SelfCase {
  int num_users;
  int num_candidates;
  int num_queries = 1;
  int num_keys = 200;
  int num_heads = 2;
  int num_kv_heads = 2;
  int head_dim = 128;
  DType dtype = DType::kFloat16;
  Own own = Own::kCausal;
  Lengths lengths = Lengths::kUsers;
  float logit_scale = 1.0f;  // of the queries
  int padding = 0;           // elements between the rows of a head, in the queries, k and v

  bool has_user_lengths() const { return lengths == Lengths::kUsers || lengths == Lengths::kBoth; }
  bool has_cand_lengths() const {
    return lengths == Lengths::kCandidates || lengths == Lengths::kBoth;
  }
  std::string id() const {
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_Q" +
           std::to_string(num_queries) + "_S" + std::to_string(num_keys) + "_H" +
           std::to_string(num_heads) + "_G" + std::to_string(num_kv_heads) + "_D" +
           std::to_string(head_dim) + "_" + std::string(name_of(dtype)) +
           (own == Own::kCausal ? "_causal" : "_full") + "_l" +
           std::to_string(static_cast<int>(lengths)) + "_s" +
           std::to_string(static_cast<int>(logit_scale)) + "_p" + std::to_string(padding);
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

// NaN in what must not count: history rows at or past the user's length, and gaps.
__global__ void poison_kernel(std::uint16_t* data, Strides stride, int num_users, int num_keys,
                              int head_dim, const std::int32_t* lengths) {
  for (int user = blockIdx.x; user < num_users; user += gridDim.x) {
    for (std::int64_t i = threadIdx.x; i < num_keys * stride.of[1]; i += 256) {
      if (i / stride.of[1] >= lengths[user] || i % stride.of[2] >= head_dim) {
        data[user * stride.of[0] + i] = 0xFFFF;
      }
    }
  }
}

struct Check {
  TargetAttentionParams p;  // the candidates' part
  Strides stride_k;
  double roundoff;
  int* g_out;
  int* g_lse;

  // fp64 softmax attention of the row that begins at element `q_at` of `q` over the first `keys`
  // keys of a user, against element `out_at` of `out` and on, and `lse`.
  __device__ void row(const void* q, std::int64_t q_at, int user, int kv_head, int keys,
                      const void* out, std::int64_t out_at, float lse) const {
    double sums[256] = {};
    double magnitude[256] = {};
    double max = -1e300;
    double sum = 0;
    for (int key = 0; key < keys; ++key) {
      const std::int64_t at =
          user * stride_k.of[0] + key * stride_k.of[1] + kv_head * stride_k.of[2];
      double logit = 0;
      for (int d = 0; d < p.head_dim; ++d) {
        logit += load_value(q, q_at + d, p.dtype) * load_value(p.k, at + d, p.dtype);
      }
      logit *= p.scale;
      const double rescale = logit > max ? exp(max - logit) : 1;
      max = fmax(max, logit);
      const double weight = exp(logit - max);
      sum = sum * rescale + weight;
      for (int d = 0; d < p.head_dim; ++d) {
        const double value = load_value(p.v, at + d, p.dtype);
        sums[d] = sums[d] * rescale + weight * value;
        magnitude[d] = magnitude[d] * rescale + weight * fabs(value);
      }
    }
    for (int d = 0; d < p.head_dim; ++d) {
      const double expected = keys == 0 ? 0 : sums[d] / sum;
      const double got = load_value(out, out_at + d, p.dtype);
      // The weights are rounded to the type of V, the output once more.
      const double budget =
          keys == 0 ? 0 : 1.05 * roundoff * (fabs(expected) + magnitude[d] / sum) + 1e-6;
      WorstExcess::report(g_out, fabs(got - expected) - budget);
    }
    if (keys == 0) {
      WorstExcess::report(g_lse, lse == -INFINITY ? 0 : 1);
    } else {
      // Beside 1e-5, the rounding of the tensor cores' sums, which grows with the logits.
      WorstExcess::report(g_lse, fabs(lse - (max + log(sum))) - 1e-5 - 5e-7 * fabs(max));
    }
  }
};

// One thread per row (entry, query, head); entries are candidates.
__global__ void check_cands_kernel(Check check, Strides stride_q) {
  const TargetAttentionParams& p = check.p;
  const std::int64_t at = blockIdx.x * std::int64_t{128} + threadIdx.x;
  if (at >= std::int64_t{p.num_candidates} * p.num_queries * p.num_heads) return;
  const int head = static_cast<int>(at % p.num_heads);
  const int query = static_cast<int>(at / p.num_heads % p.num_queries);
  const std::int64_t b = at / p.num_heads / p.num_queries;
  const int user = p.cand_to_user[b];
  int keys = p.user_lengths != nullptr ? p.user_lengths[user] : p.num_keys;
  if (p.cand_lengths != nullptr) keys = min(keys, p.cand_lengths[b]);
  check.row(p.q, b * stride_q.of[0] + query * stride_q.of[1] + head * stride_q.of[2], user,
            head / (p.num_heads / p.num_kv_heads), keys, p.out, at * p.head_dim,
            static_cast<const float*>(p.lse)[(b * p.num_heads + head) * p.num_queries + query]);
}

// Likewise; entries are users.
__global__ void check_own_kernel(Check check, Strides stride_q, const void* q, bool is_causal,
                                 const void* out, const float* lse) {
  const TargetAttentionParams& p = check.p;
  const std::int64_t at = blockIdx.x * std::int64_t{128} + threadIdx.x;
  if (at >= std::int64_t{p.num_users} * p.num_keys * p.num_heads) return;
  const int head = static_cast<int>(at % p.num_heads);
  const int query = static_cast<int>(at / p.num_heads % p.num_keys);
  const int user = static_cast<int>(at / p.num_heads / p.num_keys);
  const int length = p.user_lengths != nullptr ? p.user_lengths[user] : p.num_keys;
  const int keys = query >= length ? 0 : is_causal ? query + 1 : length;
  check.row(q, user * stride_q.of[0] + query * stride_q.of[1] + head * stride_q.of[2], user,
            head / (p.num_heads / p.num_kv_heads), keys, out, at * p.head_dim,
            lse[(std::int64_t{user} * p.num_heads + head) * p.num_keys + query]);
}

using Ints = std::vector<std::int32_t>;

// In no order; the first users have more candidates, and every third has none.
Ints make_index(const SelfCase& c) {
  Ints index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    const double at = static_cast<double>(b) / static_cast<double>(index.size());
    const auto user = static_cast<std::int32_t>(at * at * c.num_users);
    index[b] = user % 3 == 2 ? user - 1 : user;
  }
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::shuffle(index.begin(), index.end(), random);
  return index;
}

// S, then those around the sizes of tiles and blocks, then any.
Ints make_lengths(int count, int num_keys, unsigned seed) {
  const std::array some{num_keys, 0, 1, 63, 64, 65, 127, 128, 129};
  std::mt19937 random(seed);
  Ints lengths(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    lengths[i] = i < some.size() ? std::min(some[i], num_keys)
                                 : static_cast<std::int32_t>(random() % (num_keys + 1));
  }
  return lengths;
}

std::unique_ptr<GuardedBuffer> copy_of(const Ints& values) {
  auto buffer = std::make_unique<GuardedBuffer>(values.size() * 4);
  IKBO_CUDA_CHECK(
      cudaMemcpy(buffer->data(), values.data(), buffer->bytes(), cudaMemcpyHostToDevice), "values");
  return buffer;
}

struct SelfProblem {
  explicit SelfProblem(const SelfCase& c)
      : row(c.head_dim + c.padding),
        q_user(std::size_t{2} * c.num_users * c.num_keys * c.num_heads * row),
        q_cand(std::size_t{2} * c.num_candidates * c.num_queries * c.num_heads * row),
        k(std::size_t{2} * c.num_users * c.num_keys * c.num_kv_heads * row),
        v(k.bytes()),
        out_user(std::size_t{2} * c.num_users * c.num_keys * c.num_heads * c.head_dim),
        out_cand(std::size_t{2} * c.num_candidates * c.num_queries * c.num_heads * c.head_dim),
        lse_user(std::size_t{4} * c.num_users * c.num_keys * c.num_heads),
        lse_cand(std::size_t{4} * c.num_candidates * c.num_queries * c.num_heads),
        index(copy_of(make_index(c))),
        user_lengths(copy_of(make_lengths(c.num_users, c.num_keys, 1))),
        cand_lengths(copy_of(make_lengths(c.num_candidates, c.num_keys, 2))) {
    const std::int64_t q_row = c.num_heads * row;
    const std::int64_t k_row = c.num_kv_heads * row;
    TargetAttentionParams& p = params.cand;
    p.num_users = c.num_users;
    p.num_candidates = c.num_candidates;
    p.num_queries = c.num_queries;
    p.num_keys = c.num_keys;
    p.num_heads = c.num_heads;
    p.num_kv_heads = c.num_kv_heads;
    p.head_dim = c.head_dim;
    p.dtype = c.dtype;
    p.scale = 1.0 / std::sqrt(c.head_dim);
    p.q = q_cand.data();
    p.k = k.data();
    p.v = v.data();
    p.stride_q = {c.num_queries * q_row, q_row, row, 1};
    p.stride_k = p.stride_v = {c.num_keys * k_row, k_row, row, 1};
    p.cand_to_user = index->data<std::int32_t>();
    if (c.has_user_lengths()) p.user_lengths = user_lengths->data<std::int32_t>();
    if (c.has_cand_lengths()) p.cand_lengths = cand_lengths->data<std::int32_t>();
    p.out = out_cand.data();
    p.lse = lse_cand.data();
    params.q_user = q_user.data();
    params.stride_q_user = {c.num_keys * q_row, q_row, row, 1};
    params.is_causal = c.own == Own::kCausal;
    params.out_user = out_user.data();
    params.lse_user = lse_user.data();
    fill(c);
  }

  void fill(const SelfCase& c) const {
    std::uint64_t seed = 0;
    for (const GuardedBuffer* buffer : {&q_user, &q_cand, &k, &v}) {
      const bool is_query = ++seed <= 2;
      fill_kernel<<<512, 256>>>(buffer->data(), static_cast<std::int64_t>(buffer->bytes() / 2),
                                c.dtype, is_query ? c.logit_scale : 1.0f, seed << 40);
    }
    const auto lengths =
        copy_of(c.has_user_lengths() ? make_lengths(c.num_users, c.num_keys, 1)
                                     : Ints(static_cast<std::size_t>(c.num_users), c.num_keys));
    for (const GuardedBuffer* buffer : {&q_user, &k, &v}) {
      const auto& stride = buffer == &q_user ? params.stride_q_user : params.cand.stride_k;
      poison_kernel<<<512, 256>>>(buffer->data<std::uint16_t>(), on_device(stride), c.num_users,
                                  c.num_keys, c.head_dim, lengths->data<std::int32_t>());
    }
    IKBO_CUDA_CHECK(cudaDeviceSynchronize(), "inputs");
  }

  std::int64_t row;
  GuardedBuffer q_user, q_cand, k, v, out_user, out_cand, lse_user, lse_cand;
  std::unique_ptr<GuardedBuffer> index, user_lengths, cand_lengths;
  SelfTargetAttentionParams params;
};

std::vector<std::uint16_t> bits_of(const GuardedBuffer& buffer) {
  std::vector<std::uint16_t> bits(buffer.bytes() / 2);
  IKBO_CUDA_CHECK(cudaMemcpy(bits.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost),
                  "result");
  return bits;
}

// Rows without a key are zeros of any sign.
std::vector<std::uint16_t> with_one_zero(std::vector<std::uint16_t> bits) {
  std::replace(bits.begin(), bits.end(), std::uint16_t{0x8000}, std::uint16_t{0});
  return bits;
}

struct Results {
  std::vector<std::uint16_t> out_user, out_cand, lse_user, lse_cand;
  bool operator==(const Results&) const = default;
};

struct SelfRun {
  explicit SelfRun(const SelfCase& c, int num_sms = 0)
      : problem(c), limits(query_device_limits(0)) {
    if (num_sms > 0) limits.num_sms = num_sms;
    config = select_self_target_attention_cuda_config(problem.params, limits);
    workspace.emplace(self_target_attention_workspace_bytes(problem.params, config));
  }
  void operator()(cudaStream_t stream = nullptr) {
    self_target_attention(problem.params, config, limits, workspace->data(), stream);
  }
  void poison() const {
    for (const GuardedBuffer* buffer : outputs()) buffer->poison();
  }
  Results result() {
    poison();
    workspace->poison();
    (*this)();
    return read_back();
  }
  Results read_back() const {
    return {bits_of(problem.out_user), bits_of(problem.out_cand), bits_of(problem.lse_user),
            bits_of(problem.lse_cand)};
  }
  std::array<const GuardedBuffer*, 4> outputs() const {
    return {&problem.out_user, &problem.out_cand, &problem.lse_user, &problem.lse_cand};
  }

  SelfProblem problem;
  DeviceLimits limits;
  SelfTargetAttentionCudaConfig config;
  std::optional<GuardedBuffer> workspace;
};

class SelfAttentionTest : public testing::TestWithParam<SelfCase> {};

TEST_P(SelfAttentionTest, MatchesFp64Reference) {
  const SelfCase& c = GetParam();
  SelfRun run(c);
  ASSERT_EQ(run.config.kernel, SelfTargetAttentionKernel::kSm90);
  run();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << to_string(run.config);
  const SelfTargetAttentionParams& p = run.problem.params;
  const auto blocks = [](std::int64_t entries, std::int64_t queries, std::int64_t heads) {
    return static_cast<unsigned>((entries * queries * heads + 127) / 128);
  };
  for (const bool is_own : {true, false}) {
    const WorstExcess worst_out;
    const WorstExcess worst_lse;
    const Check check{.p = p.cand,
                      .stride_k = on_device(p.cand.stride_k),
                      .roundoff = c.dtype == DType::kFloat16 ? 1.0 / 2048 : 1.0 / 256,
                      .g_out = worst_out.device(),
                      .g_lse = worst_lse.device()};
    if (is_own) {
      check_own_kernel<<<blocks(c.num_users, c.num_keys, c.num_heads), 128>>>(
          check, on_device(p.stride_q_user), p.q_user, p.is_causal, p.out_user,
          static_cast<const float*>(p.lse_user));
    } else if (c.num_candidates * c.num_queries > 0) {
      check_cands_kernel<<<blocks(c.num_candidates, c.num_queries, c.num_heads), 128>>>(
          check, on_device(p.cand.stride_q));
    }
    EXPECT_EQ(worst_out.read(), 0.0f) << (is_own ? "users" : "candidates");
    EXPECT_EQ(worst_lse.read(), 0.0f) << (is_own ? "users" : "candidates");
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  for (const GuardedBuffer* buffer : run.outputs()) EXPECT_TRUE(buffer->guards_are_intact());
  EXPECT_TRUE(run.workspace->guards_are_intact());
}

// function size waiver: a table of cases, one field a line.
std::vector<SelfCase> cases() {
  std::vector<SelfCase> all;
  for (const Own own : {Own::kFull, Own::kCausal}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const int d : {32, 64, 96, 128, 192, 256, 8, 40, 72, 248}) {
        all.push_back(
            {.num_users = 11, .num_candidates = 70, .head_dim = d, .dtype = dtype, .own = own});
      }
    }
    for (const int s : {1, 15, 63, 64, 65, 127, 128, 129, 511, 1500}) {
      for (const Lengths lengths : {Lengths::kNone, Lengths::kBoth}) {
        all.push_back({.num_users = 4,
                       .num_candidates = 20,
                       .num_queries = s % 2 == 0 ? 16 : 3,
                       .num_keys = s,
                       .own = own,
                       .lengths = lengths});
        all.push_back({.num_users = 10,
                       .num_candidates = 40,
                       .num_keys = s,
                       .head_dim = 64,
                       .own = own,
                       .lengths = lengths});
      }
    }
    // Heads that share a kv head: rows of one query in boxes of several, of one, and one by one.
    for (const auto [heads, kv_heads] :
         {std::array{4, 2}, {8, 1}, {6, 2}, {5, 1}, {24, 1}, {64, 1}, {128, 1}}) {
      all.push_back({.num_users = 10,
                     .num_candidates = 30,
                     .num_queries = 2,
                     .num_keys = 150,
                     .num_heads = heads,
                     .num_kv_heads = kv_heads,
                     .head_dim = heads == 5 ? 64 : 128,
                     .own = own,
                     .lengths = heads == 8 ? Lengths::kCandidates : Lengths::kUsers});
    }
    // No candidates at all, or no queries of them.
    all.push_back({.num_users = 10, .num_candidates = 0, .num_keys = 300, .own = own});
    all.push_back(
        {.num_users = 3, .num_candidates = 9, .num_queries = 0, .num_keys = 70, .own = own});
    // More candidates or users than a CTA groups by itself, and as many as it does.
    all.push_back({.num_users = 11,
                   .num_candidates = 9000,
                   .num_keys = 150,
                   .num_heads = 1,
                   .num_kv_heads = 1,
                   .head_dim = 64,
                   .own = own,
                   .lengths = Lengths::kBoth});
    for (const int users : {256, 300, 512, 600}) {
      all.push_back({.num_users = users,
                     .num_candidates = 100,
                     .num_keys = 150,
                     .num_heads = 1,
                     .num_kv_heads = 1,
                     .own = own,
                     .lengths = users > 300 ? Lengths::kNone : Lengths::kUsers});
    }
    all.push_back({.num_users = 9,
                   .num_candidates = 50,
                   .num_queries = 8,
                   .num_keys = 400,
                   .own = own,
                   .lengths = Lengths::kBoth,
                   .padding = 8});
    all.push_back(
        {.num_users = 3, .num_candidates = 40, .num_keys = 600, .own = own, .logit_scale = 20.0f});
  }
  // More tiles of one history than a CTA lists by itself.
  all.push_back({.num_users = 2,
                 .num_candidates = 5,
                 .num_keys = 3100,
                 .num_heads = 64,
                 .num_kv_heads = 1,
                 .head_dim = 8});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, SelfAttentionTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.id(); });

// For tools that make a kernel a hundred times slower.
std::vector<SelfCase> small_cases() {
  return {{.num_users = 4, .num_candidates = 20, .num_queries = 8, .num_keys = 140},
          {.num_users = 4, .num_candidates = 9, .num_keys = 70, .own = Own::kFull},
          {.num_users = 3,
           .num_candidates = 9,
           .num_keys = 130,
           .num_heads = 3,
           .num_kv_heads = 1,
           .head_dim = 64,
           .dtype = DType::kBFloat16,
           .lengths = Lengths::kBoth},
          {.num_users = 2, .num_candidates = 5, .num_keys = 70, .head_dim = 256},
          {.num_users = 300, .num_candidates = 40, .num_keys = 20}};
}

INSTANTIATE_TEST_SUITE_P(Small, SelfAttentionTest, testing::ValuesIn(small_cases()),
                         [](const auto& info) { return info.param.id(); });

const SelfCase kMiddle{.num_users = 15,
                       .num_candidates = 257,
                       .num_queries = 20,
                       .num_keys = 700,
                       .lengths = Lengths::kBoth};

// The same rows by target_attention: the candidates, and the histories' rows as candidates of one
// query each, which see the keys up to their own.
class SelfAttentionBits : public testing::TestWithParam<Own> {};

TEST_P(SelfAttentionBits, AreThoseOfTargetAttention) {
  SelfCase c = kMiddle;
  c.own = GetParam();
  SelfRun run(c);
  const Results got = run.result();
  const auto runs_alone = [&](const TargetAttentionParams& p) {
    const TargetAttentionCudaConfig config = select_target_attention_cuda_config(p, run.limits);
    ASSERT_EQ(config.num_splits, 1);
    const GuardedBuffer workspace(target_attention_workspace_bytes(p, config));
    target_attention(p, config, run.limits, workspace.data(), nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  run.poison();
  runs_alone(run.problem.params.cand);
  EXPECT_EQ(got.out_cand, bits_of(run.problem.out_cand));
  EXPECT_EQ(got.lse_cand, bits_of(run.problem.lse_cand));

  const Ints lengths = make_lengths(c.num_users, c.num_keys, 1);
  Ints users;
  Ints seen;
  for (int user = 0; user < c.num_users; ++user) {
    const std::int32_t length = lengths[static_cast<std::size_t>(user)];
    for (int i = 0; i < c.num_keys; ++i) {
      users.push_back(user);
      seen.push_back(i >= length ? 0 : c.own == Own::kCausal ? i + 1 : length);
    }
  }
  const auto index = copy_of(users);
  const auto limits = copy_of(seen);
  TargetAttentionParams p = run.problem.params.cand;
  p.num_candidates = c.num_users * c.num_keys;
  p.num_queries = 1;
  p.q = run.problem.q_user.data();
  p.stride_q[0] = run.problem.params.stride_q_user[1];
  p.cand_to_user = index->data<std::int32_t>();
  p.cand_lengths = limits->data<std::int32_t>();
  p.out = run.problem.out_user.data();
  const GuardedBuffer lse_rows(run.problem.lse_user.bytes());
  p.lse = lse_rows.data();
  runs_alone(p);
  EXPECT_EQ(with_one_zero(got.out_user), with_one_zero(bits_of(run.problem.out_user)));
  // [U, S, H] there, [U, H, S] here; two halves of a float each.
  const std::vector<std::uint16_t> rows = bits_of(lse_rows);
  for (std::size_t at = 0; at < rows.size() / 2; ++at) {
    const std::size_t head = at % c.num_heads;
    const std::size_t query = at / c.num_heads % c.num_keys;
    const std::size_t user = at / c.num_heads / c.num_keys;
    const std::size_t ours = (user * c.num_heads + head) * c.num_keys + query;
    ASSERT_EQ(got.lse_user[2 * ours], rows[2 * at]) << user << " " << query << " " << head;
    ASSERT_EQ(got.lse_user[2 * ours + 1], rows[2 * at + 1]) << user << " " << query << " " << head;
  }
}

INSTANTIATE_TEST_SUITE_P(Own, SelfAttentionBits, testing::Values(Own::kFull, Own::kCausal));

TEST(SelfAttentionDeterminism, LaunchesAreBitwiseEqual) {
  SelfRun run(kMiddle);
  const Results first = run.result();
  for (int round = 0; round < 20; ++round) {
    run.poison();
    for (int i = 0; i < 50; ++i) run();
    ASSERT_EQ(first, run.read_back()) << "round " << round;
  }
}

TEST(SelfAttentionDeterminism, ResultsDoNotDependOnTheSharingOfWork) {
  const Results all = SelfRun(kMiddle).result();
  for (const int num_sms : {1, 7, 66}) {
    EXPECT_EQ(all, SelfRun(kMiddle, num_sms).result()) << num_sms << " multiprocessors";
  }
}

TEST(SelfAttentionDeterminism, PermutedCandidatesPermuteTheirResults) {
  SelfRun run(kMiddle);
  const Results before = run.result();
  // The last candidate comes first, and so on.
  const SelfProblem& problem = run.problem;
  const auto reversed = [](std::vector<std::uint16_t> values, int count) {
    std::vector<std::uint16_t> result;
    const auto size = static_cast<std::ptrdiff_t>(values.size()) / count;
    for (int b = count - 1; b >= 0; --b) {
      result.insert(result.end(), values.begin() + b * size, values.begin() + (b + 1) * size);
    }
    return result;
  };
  const std::array<const GuardedBuffer*, 3> by_candidate{&problem.q_cand, problem.index.get(),
                                                         problem.cand_lengths.get()};
  for (const GuardedBuffer* buffer : by_candidate) {
    const auto values = reversed(bits_of(*buffer), kMiddle.num_candidates);
    IKBO_CUDA_CHECK(
        cudaMemcpy(buffer->data(), values.data(), buffer->bytes(), cudaMemcpyHostToDevice),
        "reversed");
  }
  const Results after = run.result();
  EXPECT_EQ(before.out_user, after.out_user);
  EXPECT_EQ(before.lse_user, after.lse_user);
  EXPECT_EQ(reversed(before.out_cand, kMiddle.num_candidates), after.out_cand);
  EXPECT_EQ(reversed(before.lse_cand, kMiddle.num_candidates), after.lse_cand);
}

TEST(SelfAttentionStreams, TwoStreamsAndAGraphAtOnce) {
  SelfRun one(kMiddle);
  // With a kernel ahead that groups.
  SelfRun two({.num_users = 300, .num_candidates = 300, .num_keys = 100, .head_dim = 64});
  expect_no_change_by_the_other(one, two);
}

}  // namespace
}  // namespace ikbo::test
