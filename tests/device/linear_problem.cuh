// SPDX-License-Identifier: Apache-2.0
// One call of ikbo::linear for a test: what it reads, its workspace, an fp64 reference of its
// output. Memory that is no element of an operand holds NaN, or infinities.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/linear.h"

namespace ikbo::test {

// A layout of [rows, k]: where its elements lie in a buffer that is NaN everywhere else.
enum class Layout {
  kDense,
  kSpaced,      // 3 more elements a row
  kOffset,      // starts 5 elements after an aligned address, 1 more element a row
  kTransposed,  // k outermost
};

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
  Holes holes = Holes::kSomeRows;
  Gap gap = Gap::kNaN;
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

__device__ inline float coded_value(Role role, std::int64_t row, std::int64_t k, std::int64_t num_k,
                                    DType dtype) {
  if (role == Role::kBias) return 1;
  if (role == Role::kWeight) return picks(row, k, num_k) ? 1 : 0;
  return code_of(row, 0, k, dtype);
}

// [rows, k] in device memory.
struct Tensor2 {
  void* data;
  std::int64_t rows;
  std::int64_t k;
  std::int64_t stride_row;
  std::int64_t stride_k;
  DType dtype;
  Role role;
};

// Rows that are a `hole` keep what they are.
__global__ void fill_kernel(Tensor2 t, PeriodicHole hole, Values values, float scale,
                            std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < t.rows * t.k;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t row = i / t.k;
    const std::int64_t k = i % t.k;
    if (hole.holds(row)) continue;
    store_value(t.data, row * t.stride_row + k * t.stride_k, t.dtype,
                values == Values::kCodes ? coded_value(t.role, row, k, t.k, t.dtype)
                                         : random_value(values, scale, seed + i));
  }
}

__device__ inline double activated(Activation activation, double x) {
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

__global__ void compare_kernel(LinearParams p, double unit_roundoff, bool is_exact,
                               WrongElements::Counts* g_wrong) {
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
      if (!isnan(got)) WrongElements::report(g_wrong, i, 1);
    } else if (is_exact) {
      if (got != rounded_value(static_cast<float>(expected), p.dtype)) {
        WrongElements::report(g_wrong, i, 1);
      }
    } else {
      // One rounding to the output type, fp32 sums whose error grows at worst like sqrt(K) here and
      // which no activation stretches by more than 1.13, and fp32 activations.
      const double budget =
          (unit_roundoff + 1e-6) * fabs(expected) + 1.13 * 8 * 5.97e-8 * magnitude + 1e-7;
      WrongElements::report(g_wrong, i, fabs(got - expected) - budget);
    }
  }
}

// Shuffled; with holes, only even users are named.
inline std::vector<std::int32_t> make_index(const LinearCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    const auto user =
        static_cast<std::int32_t>(b * static_cast<std::size_t>(c.num_users) / index.size());
    index[b] = c.holes == Holes::kNone ? user : user / 2 * 2;
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
    for (const Matrix* matrix : {&x_user, &x_cand, &w_user, &w_cand}) {
      fill_gaps(matrix->buffer, c.dtype, c.gap);
    }
    fill(c, x_user, {c.num_users, c.k_user, Role::kInput}, unnamed_users(c.holes), 1.0f, 1);
    fill(c, x_cand, {c.num_candidates, c.k_cand, Role::kInput}, poisoned_candidates(c.holes), 1.0f,
         2);
    fill(c, w_user, {c.m, c.k_user, Role::kWeight}, {}, 0.05f, 3);
    fill(c, w_cand, {c.m, c.k_cand, Role::kWeight}, poisoned_weights(c.holes), 0.05f, 4);
    fill(c, bias, {1, c.m, Role::kBias}, {}, 1.0f, 5);
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

  struct Shape {
    std::int64_t rows;
    std::int64_t k;
    Role role;
  };
  static void fill(const LinearCase& c, const Matrix& matrix, const Shape& shape,
                   const PeriodicHole& hole, float scale, std::uint64_t seed) {
    const Tensor2 tensor{matrix.data(c.dtype), shape.rows, shape.k,   matrix.stride_row,
                         matrix.stride_k,      c.dtype,    shape.role};
    fill_kernel<<<512, 256>>>(tensor, hole, c.values, scale, seed << 40);
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

inline LinearConfig make_config(const LinearCase& c, const LinearParams& params) {
  LinearConfig config = select_linear_config(params, query_device_limits(0));
  if (c.pinned.tile_rows != 0) config.user = config.candidate = c.pinned;
  return config;
}

// Of the output in `params`, as text; "" for none. With exact sums, none means that it has the bits
// of its integers but for the sign of zero.
inline std::string wrong_elements(const LinearCase& c, const LinearParams& params) {
  const WrongElements wrong;
  compare_kernel<<<2048, 256>>>(params, unit_roundoff_of(c.dtype), has_exact_sums(c.values),
                                wrong.device());
  return wrong.text(params.m);
}

// Every tiling of linear_sm90.
inline std::vector<LinearTiling> all_tilings() {
  std::vector<LinearTiling> tilings;
  for (const int tile_m : {64, 128, 160, 192, 224, 256}) tilings.push_back({128, tile_m, 1});
  for (const int split_k : {1, 2, 4, 8}) tilings.push_back({64, 64, split_k});
  return tilings;
}

// A problem with the workspace of its calls.
struct LinearRun {
  explicit LinearRun(const LinearCase& c)
      : problem(c),
        limits(query_device_limits(0)),
        config(make_config(c, problem.params)),
        workspace(linear_workspace_bytes(problem.params, config)) {
    problem.params.workspace = workspace.data();
  }
  void operator()(cudaStream_t stream = nullptr) { linear(problem.params, config, limits, stream); }
  std::vector<std::uint8_t> result() {
    problem.out.poison();
    (*this)();
    return problem.read_out();
  }

  LinearProblem problem;
  DeviceLimits limits;
  LinearConfig config;
  GuardedBuffer workspace;
};

}  // namespace ikbo::test
