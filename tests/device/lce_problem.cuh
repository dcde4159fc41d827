// SPDX-License-Identifier: Apache-2.0
// One call of ikbo::lce for a test: what it reads, its workspace, an fp64 reference of its output.
// Memory that is no element of an operand holds NaN, or infinities.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/lce.h"

namespace ikbo::test {

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
  int spare_rows = 0;     // no elements: after the K rows of each batch entry of E
  int spare_columns = 0;  // likewise, after the N columns of each row of E and the K of each of W
  bool has_bias = true;
  bool transposed = false;  // E with K innermost: no kernel but the generic one takes it
  std::vector<int> list;    // K_i of a candidate side in parts; their sum is k_cand
  Holes holes = Holes::kNone;
  Gap gap = Gap::kNaN;

  std::string id() const {
    std::string text =
        "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_M" +
        std::to_string(m) + "_N" + std::to_string(n) + "_Ku" + std::to_string(k_user) + "_Kc" +
        std::to_string(k_cand) + "_" + std::string(name_of(dtype)) + "_o" +
        std::to_string(static_cast<int>(order)) + "_v" + std::to_string(static_cast<int>(values)) +
        "_s" + std::to_string(spare_rows) + "_b" + std::to_string(has_bias) + "_t" +
        std::to_string(transposed) + "_l" + std::to_string(list.size());
    if (spare_columns > 0) text += "_c" + std::to_string(spare_columns);
    return text;
  }
};

// An operand [batch, rows, columns].
struct Tensor3 {
  void* data;
  std::int64_t sizes[3];
  std::int64_t strides[3];
  DType dtype;
  Role role = Role::kInput;
};

__device__ inline float coded_value(const Tensor3& t, std::int64_t entry, std::int64_t row,
                                    std::int64_t column) {
  if (t.role == Role::kBias) return 1;
  if (t.role == Role::kWeight) return picks(row, column, t.sizes[2]) ? 1 : 0;
  return code_of(entry, row, column, t.dtype);
}

// Entries of the batch that are a `hole` keep what they are.
__global__ void fill_kernel(Tensor3 t, PeriodicHole hole, Values values, float scale,
                            std::uint64_t seed) {
  const std::int64_t count = t.sizes[0] * t.sizes[1] * t.sizes[2];
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t entry = i / (t.sizes[1] * t.sizes[2]);
    const std::int64_t row = i / t.sizes[2] % t.sizes[1];
    const std::int64_t column = i % t.sizes[2];
    if (hole.holds(entry)) continue;
    store_value(t.data, entry * t.strides[0] + row * t.strides[1] + column * t.strides[2], t.dtype,
                values == Values::kCodes ? coded_value(t, entry, row, column)
                                         : random_value(values, scale, seed + i));
  }
}

__global__ void compare_kernel(LceParams p, double unit_roundoff, bool is_exact,
                               WrongElements::Counts* g_wrong) {
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
          load_value(p.w_user, row * p.stride_w_user_m + k * p.stride_w_user_k, p.dtype) *
          load_value(p.e_user,
                     u * p.stride_e_user_u + k * p.stride_e_user_k + column * p.stride_e_user_n,
                     p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    for (int k = 0; k < p.k_cand; ++k) {
      const double product =
          load_value(p.w_cand, row * p.stride_w_cand_m + k * p.stride_w_cand_k, p.dtype) *
          load_value(p.e_cand,
                     b * p.stride_e_cand_b + k * p.stride_e_cand_k + column * p.stride_e_cand_n,
                     p.dtype);
      sum += product;
      magnitude += fabs(product);
    }
    const double got = load_value(p.out, i, p.dtype);
    if (is_exact) {
      if (got != rounded_value(static_cast<float>(sum), p.dtype)) {
        WrongElements::report(g_wrong, i, 1);
      }
      continue;
    }
    // One rounding to the output type, and fp32 sums whose error grows at worst like sqrt(K) here.
    const double budget = unit_roundoff * fabs(sum) + 8 * 5.97e-8 * magnitude + 1e-7;
    WrongElements::report(g_wrong, i, fabs(got - sum) - budget);
  }
}

inline std::vector<std::int32_t> make_index(const LceCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    index[b] =
        c.order == Order::kAllOneUser
            ? c.num_users - 1
            : static_cast<std::int32_t>(b * static_cast<std::size_t>(c.num_users) / index.size());
    if (c.holes != Holes::kNone) index[b] = index[b] / 2 * 2;
  }
  if (c.order == Order::kShuffled) std::shuffle(index.begin(), index.end(), random);
  return index;
}

// Everything one case needs on the device.
struct LceProblem {
  explicit LceProblem(const LceCase& c)
      : e_user(bytes(c, c.num_users * entry_size(c, c.k_user))),
        e_cand(bytes(c, c.num_candidates * entry_size(c, c.k_cand))),
        w_user(bytes(c, std::int64_t{c.m} * (c.k_user + c.spare_columns))),
        w_cand(bytes(c, std::int64_t{c.m} * (c.k_cand + c.spare_columns))),
        bias(bytes(c, c.m)),
        list(c.list.empty() ? 0 : bytes(c, c.num_candidates * list_entry_size(c))),
        index(static_cast<std::size_t>(c.num_candidates) * 4),
        out(bytes(c, std::int64_t{c.num_candidates} * c.m * c.n)) {
    const std::vector<std::int32_t> host_index = make_index(c);
    IKBO_CUDA_CHECK(
        cudaMemcpy(index.data(), host_index.data(), index.bytes(), cudaMemcpyHostToDevice),
        "index");
    const std::int64_t row = c.n + c.spare_columns;
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
              .stride_e_user_u = ku * row,
              .stride_e_user_k = c.transposed ? 1 : row,
              .stride_e_user_n = c.transposed ? ku : 1,
              .stride_e_cand_b = kc * row,
              .stride_e_cand_k = c.transposed ? 1 : row,
              .stride_e_cand_n = c.transposed ? kc : 1,
              .stride_w_user_m = c.k_user + c.spare_columns,
              .stride_w_cand_m = c.k_cand + c.spare_columns};
    for (const GuardedBuffer* buffer : {&e_user, &e_cand, &w_user, &w_cand, &list}) {
      fill_gaps(*buffer, c.dtype, c.gap);
    }
    fill(tensor_e_user(), unnamed_users(c.holes), c.values, 1.0f, 1);
    fill(tensor_e_cand(), poisoned_candidates(c.holes), c.values, 1.0f, 2);
    fill(tensor_w_user(), {}, c.values, 0.05f, 3);
    fill(tensor_w_cand(), {}, c.values, 0.05f, 4);
    fill({bias.data(), {1, 1, c.m}, {c.m, c.m, 1}, c.dtype, Role::kBias}, {}, c.values, 1.0f, 5);
    if (!c.list.empty()) make_list(c);
  }
  LceProblem(const LceProblem&) = delete;
  LceProblem& operator=(const LceProblem&) = delete;

  Tensor3 tensor_e_user() const {
    return {e_user.data(),
            {params.num_users, params.k_user, params.n},
            {params.stride_e_user_u, params.stride_e_user_k, params.stride_e_user_n},
            params.dtype};
  }
  Tensor3 tensor_e_cand() const {
    return {e_cand.data(),
            {params.num_candidates, params.k_cand, params.n},
            {params.stride_e_cand_b, params.stride_e_cand_k, params.stride_e_cand_n},
            params.dtype};
  }
  Tensor3 tensor_w_user() const {
    return {w_user.data(),
            {1, params.m, params.k_user},
            {0, params.stride_w_user_m, 1},
            params.dtype,
            Role::kWeight};
  }
  Tensor3 tensor_w_cand() const {
    return {w_cand.data(),
            {1, params.m, params.k_cand},
            {0, params.stride_w_cand_m, 1},
            params.dtype,
            Role::kWeight};
  }

  static void fill(const Tensor3& tensor, const PeriodicHole& hole, Values values, float scale,
                   std::uint64_t seed) {
    fill_kernel<<<512, 256>>>(tensor, hole, values, scale, seed << 40);
  }

  // The rows of e_cand once more, as parts that are slices of one tensor with gaps between.
  void make_list(const LceCase& c) {
    const std::size_t row = static_cast<std::size_t>(params.stride_e_cand_k) * size_of(c.dtype);
    const std::size_t entry = list_entry_size(c) * size_of(c.dtype);
    std::size_t from = 0;
    std::size_t to = 0;
    for (const int k : c.list) {
      IKBO_CUDA_CHECK(
          cudaMemcpy2D(list.data<char>() + to * row, entry, e_cand.data<char>() + from * row,
                       params.stride_e_cand_b * size_of(c.dtype), k * row, c.num_candidates,
                       cudaMemcpyDeviceToDevice),
          "list");
      parts.push_back({.e = list.data<char>() + to * row,
                       .k = k,
                       .stride_b = list_entry_size(c),
                       .stride_k = params.stride_e_cand_k});
      from += k;
      to += k + kGapRows;
    }
    params.cand_parts = parts.data();
    params.num_cand_parts = static_cast<std::int32_t>(parts.size());
  }

  static std::size_t bytes(const LceCase& c, std::int64_t count) {
    return static_cast<std::size_t>(count) * size_of(c.dtype);
  }
  static std::int64_t entry_size(const LceCase& c, int k) {
    return std::int64_t{k + c.spare_rows} * (c.n + c.spare_columns);
  }
  static std::int64_t list_entry_size(const LceCase& c) {
    return (c.k_cand + kGapRows * static_cast<std::int64_t>(c.list.size())) *
           (c.n + c.spare_columns);
  }

  static constexpr int kGapRows = 2;
  GuardedBuffer e_user, e_cand, w_user, w_cand, bias, list, index, out;
  std::vector<LcePart> parts;
  LceParams params;
};

inline std::vector<std::uint16_t> read_back(const GuardedBuffer& buffer) {
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

// Of the output in `params`, as text; "" for none. With exact sums, none means that it has the bits
// of its integers but for the sign of zero.
inline std::string wrong_elements(const LceCase& c, const LceParams& params) {
  const WrongElements wrong;
  compare_kernel<<<2048, 256>>>(params, unit_roundoff_of(c.dtype), has_exact_sums(c.values),
                                wrong.device());
  return wrong.text(std::int64_t{params.m} * params.n);
}

}  // namespace ikbo::test
