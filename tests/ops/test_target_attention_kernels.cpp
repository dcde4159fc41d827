// SPDX-License-Identifier: Apache-2.0
// The kernels of target attention under every instruction set that this machine runs, against the
// definition in double; their exponential; their configuration.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ikbo/target_attention.h"

// The vector type of the baseline, to test its exponential by itself.
#define IKBO_ISA test_isa
#include "cpu/target_attention_vec.h"

namespace ikbo {

// How gtest prints a parameter.
void PrintTo(CpuIsa isa, std::ostream* out) {
  constexpr const char* kNames[] = {"x86_64", "x86_64_v3", "x86_64_v4"};
  *out << kNames[static_cast<int>(isa)];
}

namespace {

struct Problem {
  Problem(int num_users, int num_candidates, int head_dim, unsigned seed) : random(seed) {
    params = {.num_users = num_users,
              .num_candidates = num_candidates,
              .num_queries = 2,
              .num_keys = 300,
              .num_heads = 4,
              .num_kv_heads = 2,
              .head_dim = head_dim,
              .dtype = DType::kFloat64,
              .scale = 0.3};
    const int64_t d = head_dim;
    params.stride_q = {2 * 4 * d, 4 * d, d, 1};
    params.stride_k = params.stride_v = {300 * 2 * d, 2 * d, d, 1};
    fill(q, num_candidates * params.stride_q[0]);
    fill(k, num_users * params.stride_k[0]);
    fill(v, num_users * params.stride_k[0]);
    fill(grad_out, num_candidates * params.stride_q[0]);
    fill(grad_lse, num_candidates * 8);
    for (int b = 0; b < num_candidates; ++b) {
      cand_to_user.push_back(uniform(num_users));
      cand_lengths.push_back(b % 7 == 0 ? 0 : uniform(301));
    }
    for (int u = 0; u < num_users; ++u) {
      user_lengths.push_back(uniform(301));
    }
    mask = std::make_unique<bool[]>(num_users * 300);
    std::generate_n(mask.get(), num_users * 300, [&] { return uniform(4) != 0; });
    params.cand_to_user = cand_to_user.data();
    params.user_lengths = user_lengths.data();
    params.cand_lengths = cand_lengths.data();
    params.user_mask = mask.get();
  }

  int uniform(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random); }
  void fill(std::vector<double>& values, int64_t count) {
    std::normal_distribution<double> normal;
    std::generate_n(std::back_inserter(values), count, [&] { return normal(random); });
  }
  bool counts(int b, int s) const {
    const int u = cand_to_user[b];
    return s < user_lengths[u] && s < cand_lengths[b] && mask[u * 300 + s];
  }

  std::mt19937 random;
  TargetAttentionParams params;
  std::vector<double> q, k, v, grad_out, grad_lse;
  std::vector<int32_t> cand_to_user, user_lengths, cand_lengths;
  std::unique_ptr<bool[]> mask;
};

struct Results {
  std::vector<double> out, lse, grad_q, grad_k, grad_v;
};

Results zeros_of(const Problem& problem) {
  return {std::vector<double>(problem.q.size()), std::vector<double>(problem.grad_lse.size()),
          std::vector<double>(problem.q.size()), std::vector<double>(problem.k.size()),
          std::vector<double>(problem.v.size())};
}

// One row of the definition and of its derivative.
void add_row(const Problem& problem, int b, int query, int head, Results& results) {
  const TargetAttentionParams& p = problem.params;
  const int d = p.head_dim;
  const int64_t row = ((b * 2 + query) * 4 + head) * int64_t{d};
  const int64_t statistic = (b * 4 + head) * 2 + query;
  const int64_t keys = problem.cand_to_user[b] * p.stride_k[0] + head / 2 * int64_t{d};
  const auto dot = [d](const double* a, const double* c) {
    return std::inner_product(a, a + d, c, 0.0);
  };
  std::vector<double> weight(300, 0.0);
  double sum = 0.0;
  for (int s = 0; s < 300; ++s) {
    if (problem.counts(b, s)) {
      weight[s] = std::exp(p.scale * dot(&problem.q[row], &problem.k[keys + s * 2 * d]));
      sum += weight[s];
    }
  }
  results.lse[statistic] = std::log(sum);
  double delta = -problem.grad_lse[statistic];
  for (int s = 0; s < 300 && sum > 0.0; ++s) {
    weight[s] /= sum;
    for (int i = 0; i < d; ++i) {
      results.out[row + i] += weight[s] * problem.v[keys + s * 2 * d + i];
    }
  }
  delta += dot(&problem.grad_out[row], &results.out[row]);
  for (int s = 0; s < 300; ++s) {
    const int64_t key = keys + s * 2 * d;
    const double grad =
        p.scale * weight[s] * (dot(&problem.grad_out[row], &problem.v[key]) - delta);
    for (int i = 0; i < d; ++i) {
      results.grad_q[row + i] += grad * problem.k[key + i];
      results.grad_k[key + i] += grad * problem.q[row + i];
      results.grad_v[key + i] += weight[s] * problem.grad_out[row + i];
    }
  }
}

Results definition(const Problem& problem) {
  Results results = zeros_of(problem);
  for (int row = 0; row < problem.params.num_candidates * 8; ++row) {
    add_row(problem, row / 8, row / 4 % 2, row % 4, results);
  }
  return results;
}

template <class Run>
void on_two_threads(const Run& run) {
  std::atomic<int64_t> next_task{0};
  std::thread other([&] { run(next_task); });
  run(next_task);
  other.join();
}

template <class T>
Results computed(const Problem& problem, CpuIsa isa) {
  const auto narrowed = [](const std::vector<double>& values) {
    return std::vector<T>(values.begin(), values.end());
  };
  const std::vector<T> q = narrowed(problem.q), k = narrowed(problem.k), v = narrowed(problem.v),
                       grad_out = narrowed(problem.grad_out), grad_lse = narrowed(problem.grad_lse);
  std::vector<T> out(q.size()), lse(grad_lse.size()), grad_q(q.size()), grad_k(k.size()),
      grad_v(k.size());
  TargetAttentionGradParams params{.forward = problem.params,
                                   .grad_out = grad_out.data(),
                                   .grad_lse = grad_lse.data(),
                                   .grad_q = grad_q.data(),
                                   .grad_k = grad_k.data(),
                                   .grad_v = grad_v.data()};
  params.forward.dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  params.forward.q = q.data();
  params.forward.k = k.data();
  params.forward.v = v.data();
  params.forward.out = out.data();
  params.forward.lse = lse.data();
  const TargetAttentionConfig config = select_target_attention_config(params.forward);
  const TargetAttentionPlan plan(params.forward, config);
  on_two_threads([&](auto& next) { run_target_attention(params.forward, plan, isa, next); });
  const auto backward = TargetAttentionPlan::for_backward(params.forward, config);
  on_two_threads([&](auto& next) { run_target_attention_backward(params, backward, isa, next); });
  const auto widened = [](const std::vector<T>& values) {
    return std::vector<double>(values.begin(), values.end());
  };
  return {widened(out), widened(lse), widened(grad_q), widened(grad_k), widened(grad_v)};
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance,
                 const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(want[i])) {
      ASSERT_EQ(got[i], want[i]) << what << "[" << i << "]";
    } else {
      ASSERT_NEAR(got[i], want[i], tolerance) << what << "[" << i << "]";
    }
  }
}

void expect_near(const Results& got, const Results& want, double tolerance) {
  expect_near(got.out, want.out, tolerance, "out");
  expect_near(got.lse, want.lse, tolerance, "lse");
  expect_near(got.grad_q, want.grad_q, tolerance, "grad_q");
  expect_near(got.grad_k, want.grad_k, tolerance, "grad_k");
  expect_near(got.grad_v, want.grad_v, tolerance, "grad_v");
}

class TargetAttention : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (GetParam() > native_cpu_isa()) {
      GTEST_SKIP() << "this machine does not run the instruction set";
    }
  }
};

TEST_P(TargetAttention, AgreesWithTheDefinition) {
  for (const int head_dim : {1, 20, 64, 130}) {
    const Problem problem(3, 40, head_dim, 1);
    const Results want = definition(problem);
    expect_near(computed<double>(problem, GetParam()), want, 1e-11);
    expect_near(computed<float>(problem, GetParam()), want, 1e-3);
  }
}

TEST_P(TargetAttention, RowsDoNotDependOnTheirBatch) {
  Problem problem(3, 60, 20, 2);
  const Results whole = computed<float>(problem, GetParam());
  problem.params.num_candidates = 7;
  problem.q.resize(7 * problem.params.stride_q[0]);
  problem.grad_out.resize(problem.q.size());
  problem.grad_lse.resize(7 * 8);
  const Results part = computed<float>(problem, GetParam());
  EXPECT_TRUE(std::equal(part.out.begin(), part.out.end(), whole.out.begin()));
  EXPECT_TRUE(std::equal(part.lse.begin(), part.lse.end(), whole.lse.begin()));
  EXPECT_TRUE(std::equal(part.grad_q.begin(), part.grad_q.end(), whole.grad_q.begin()));
}

// The same histories one after the other, behind rows that are no user's.
TEST_P(TargetAttention, PackedHistoriesHaveTheBitsOfPaddedOnes) {
  Problem problem(3, 60, 20, 3);
  problem.params.user_mask = nullptr;
  const Results padded = computed<float>(problem, GetParam());
  const int64_t row = problem.params.stride_k[1];
  std::vector<int32_t> offsets{0};
  std::vector<double> k, v;
  for (int u = 0; u < 3; ++u) {
    const int64_t begin = u * problem.params.stride_k[0];
    const int64_t end = begin + problem.user_lengths[u] * row;
    k.insert(k.end(), problem.k.begin() + begin, problem.k.begin() + end);
    v.insert(v.end(), problem.v.begin() + begin, problem.v.begin() + end);
    offsets.push_back(offsets.back() + problem.user_lengths[u]);
  }
  problem.k = k;
  problem.v = v;
  problem.params.user_offsets = offsets.data();
  problem.params.user_lengths = nullptr;
  problem.params.num_keys =
      *std::max_element(problem.user_lengths.begin(), problem.user_lengths.end());
  problem.params.stride_k[0] = problem.params.stride_v[0] = -1;
  const Results packed = computed<float>(problem, GetParam());
  EXPECT_EQ(packed.out, padded.out);
  EXPECT_EQ(packed.lse, padded.lse);
  EXPECT_EQ(packed.grad_q, padded.grad_q);
  for (int u = 0; u < 3; ++u) {
    const int64_t from = u * 300 * row;
    const int64_t count = problem.user_lengths[u] * row;
    EXPECT_TRUE(std::equal(&padded.grad_k[from], &padded.grad_k[from + count],
                           packed.grad_k.begin() + offsets[u] * row));
    EXPECT_TRUE(std::equal(&padded.grad_v[from], &padded.grad_v[from + count],
                           packed.grad_v.begin() + offsets[u] * row));
  }
}

std::string isa_name(const testing::TestParamInfo<CpuIsa>& isa) {
  return testing::PrintToString(isa.param);
}

INSTANTIATE_TEST_SUITE_P(Isa, TargetAttention,
                         testing::Values(CpuIsa::kX86_64, CpuIsa::kX86_64_v3, CpuIsa::kX86_64_v4),
                         isa_name);

template <class T>
double worst_exp2_error(double lowest) {
  using cpu::test_isa::Vec;
  double worst = 0.0;
  for (double x = lowest; x <= 1.0; x += 1.0 / 1024 + 1e-5) {
    const T rounded = static_cast<T>(x);
    const Vec<T> result = cpu::test_isa::exp2_of(cpu::test_isa::broadcast(rounded));
    const long double want = std::exp2(static_cast<long double>(rounded));
    worst = std::max(worst, static_cast<double>(std::abs(result[0] - want) / want));
  }
  return worst / std::numeric_limits<T>::epsilon();
}

TEST(TargetAttentionExp2, IsAccurate) {
  EXPECT_LT(worst_exp2_error<float>(-126.0), 1.5);
  EXPECT_LT(worst_exp2_error<double>(-1022.0), 1.5);
}

TEST(TargetAttentionExp2, EndsInZeroAndKeepsNan) {
  using cpu::test_isa::broadcast;
  using cpu::test_isa::exp2_of;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp2_of(broadcast(-kInf))[0], 0.0f);
  EXPECT_EQ(exp2_of(broadcast(-1e30f))[0], 0.0f);
  EXPECT_EQ(exp2_of(broadcast(0.0f))[0], 1.0f);
  EXPECT_TRUE(std::isnan(exp2_of(broadcast(std::nanf("7")))[0]));
  EXPECT_TRUE(std::isnan(exp2_of(broadcast(std::nan("7")))[0]));
}

TEST(TargetAttentionConfig, FollowsTheSizes) {
  TargetAttentionParams params{.num_users = 16,
                               .num_candidates = 1024,
                               .num_queries = 1,
                               .num_keys = 512,
                               .num_heads = 2,
                               .num_kv_heads = 2,
                               .head_dim = 64};
  EXPECT_EQ(to_string(select_target_attention_config(params)), "cpu_rows96_keys256");
  // A longer history or more users change nothing: a row's sums must not depend on them.
  params.num_keys = 50000;
  params.num_users = 1;
  EXPECT_EQ(select_target_attention_config(params).key_block, 256);
  params.num_candidates = 300;
  EXPECT_EQ(select_target_attention_config(params).row_tile, 24);
  params.head_dim = 0;
  EXPECT_EQ(select_target_attention_config(params).key_block, 256);
}

}  // namespace
}  // namespace ikbo
