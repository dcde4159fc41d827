// SPDX-License-Identifier: Apache-2.0
// The generic LCE kernels against an fp64 reference, every output element: each layout that
// operands may have, both tile sizes, sizes from nothing to more than 2^31 output elements.
// Memory that is no element of an operand holds NaN.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"
#include "ikbo/lce.h"
#include "kernels/lce/lce_generic.h"

namespace ikbo::test {
namespace {

enum class Layout { kContiguous, kShifted, kPaddedOdd, kPaddedEven, kTransposed, kStrided };

constexpr std::array kLayoutNames{"contiguous", "shifted",    "paddedodd",
                                  "paddedeven", "transposed", "strided"};

struct GenericCase {
  int num_users;
  int num_candidates;
  int m;
  int n;
  int k_user;
  int k_cand;
  DType dtype = DType::kFloat16;
  Layout e = Layout::kContiguous;
  Layout w = Layout::kContiguous;
  int tile = lce_impl::kSmallTile;
  bool has_bias = true;

  std::string id() const {
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_M" +
           std::to_string(m) + "_N" + std::to_string(n) + "_Ku" + std::to_string(k_user) + "_Kc" +
           std::to_string(k_cand) + "_" + std::string(name_of(dtype)) + "_e" +
           kLayoutNames[static_cast<std::size_t>(e)] + "_w" +
           kLayoutNames[static_cast<std::size_t>(w)] + "_t" + std::to_string(tile) + "_b" +
           std::to_string(has_bias);
  }
};

// [batch, rows, columns] in device memory.
struct Operand {
  std::int64_t sizes[3];
  std::int64_t strides[3];
  DType dtype;
  void* data;
};

__global__ void fill_kernel(Operand o, std::uint64_t seed) {
  const std::int64_t count = o.sizes[0] * o.sizes[1] * o.sizes[2];
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t at = i / (o.sizes[1] * o.sizes[2]) * o.strides[0] +
                            i / o.sizes[2] % o.sizes[1] * o.strides[1] +
                            i % o.sizes[2] * o.strides[2];
    store_value(o.data, at, o.dtype, random_value(Values::kNormal, 1.0f, (seed << 40) + i));
  }
}

// Adds row `row` of w times column `column` of e[batch].
__device__ void add_product(const Operand& w, const Operand& e, std::int64_t batch, int row,
                            int column, double& sum, double& magnitude) {
  for (std::int64_t k = 0; k < e.sizes[1]; ++k) {
    const double product =
        load_value(w.data, row * w.strides[1] + k * w.strides[2], w.dtype) *
        load_value(e.data, batch * e.strides[0] + k * e.strides[1] + column * e.strides[2],
                   e.dtype);
    sum += product;
    magnitude += fabs(product);
  }
}

struct Problem {
  Operand e_user;
  Operand e_cand;
  Operand w_user;
  Operand w_cand;
  const void* bias;
  const std::int32_t* cand_to_user;
  const void* out;
};

struct Wrong {
  unsigned long long count;
  unsigned long long first;
};

// Output elements that are off by more than their budget.
__global__ void compare_kernel(Problem p, double unit_roundoff, Wrong* wrong) {
  const std::int64_t m = p.w_cand.sizes[1];
  const std::int64_t n = p.e_cand.sizes[2];
  const std::int64_t count = p.e_cand.sizes[0] * m * n;
  const DType dtype = p.e_cand.dtype;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t b = i / (m * n);
    const int row = static_cast<int>(i / n % m);
    const int column = static_cast<int>(i % n);
    double sum = p.bias != nullptr ? load_value(p.bias, row, dtype) : 0;
    double magnitude = fabs(sum);
    add_product(p.w_user, p.e_user, p.cand_to_user[b], row, column, sum, magnitude);
    add_product(p.w_cand, p.e_cand, b, row, column, sum, magnitude);
    // One rounding to the output type, and fp32 sums: the errors of random products grow like
    // sqrt(K), with a factor that holds for all of 10^9 elements.
    const double additions = 4 + 2 * sqrt(double(p.e_user.sizes[1] + p.e_cand.sizes[1]));
    const double budget = unit_roundoff * fabs(sum) + additions * 5.97e-8 * magnitude + 1e-7;
    if (!(fabs(load_value(p.out, i, dtype) - sum) <= budget)) {
      atomicAdd(&wrong->count, 1ull);
      atomicMin(&wrong->first, static_cast<unsigned long long>(i));
    }
  }
}

// Buffers of one operand, of a layout, its elements random and all else NaN.
class OperandMemory {
 public:
  OperandMemory(std::array<std::int64_t, 3> sizes, Layout layout, DType dtype, std::uint64_t seed) {
    const auto [batch, rows, columns] = sizes;
    std::array<std::int64_t, 3> strides{rows * columns, columns, 1};
    if (layout == Layout::kPaddedOdd || layout == Layout::kPaddedEven) {
      const std::int64_t row =
          layout == Layout::kPaddedOdd ? columns + columns % 2 + 1 : (columns + 7) / 8 * 8 + 8;
      strides = {rows * row, row, 1};
    }
    if (layout == Layout::kTransposed) strides = {rows * columns, 1, rows};
    if (layout == Layout::kStrided) strides = {rows * columns * 2, columns * 2, 2};
    const std::int64_t shift = layout == Layout::kShifted ? 1 : 0;
    const std::int64_t elements = batch * strides[0] + shift;
    buffer_ = std::make_unique<GuardedBuffer>(static_cast<std::size_t>(elements) * size_of(dtype));
    operand_ = {{batch, rows, columns},
                {strides[0], strides[1], strides[2]},
                dtype,
                buffer_->data<char>() + shift * static_cast<std::int64_t>(size_of(dtype))};
    fill_kernel<<<512, 256>>>(operand_, seed);
  }
  const Operand& operand() const { return operand_; }

 private:
  Operand operand_{};
  std::unique_ptr<GuardedBuffer> buffer_;
};

LceParams make_params(const GenericCase& c, const Problem& p, void* out) {
  return {.num_users = c.num_users,
          .num_candidates = c.num_candidates,
          .m = c.m,
          .n = c.n,
          .k_user = c.k_user,
          .k_cand = c.k_cand,
          .dtype = c.dtype,
          .e_user = p.e_user.data,
          .e_cand = p.e_cand.data,
          .w_user = p.w_user.data,
          .w_cand = p.w_cand.data,
          .bias = p.bias,
          .cand_to_user = p.cand_to_user,
          .out = out,
          .stride_e_user_u = p.e_user.strides[0],
          .stride_e_user_k = p.e_user.strides[1],
          .stride_e_user_n = p.e_user.strides[2],
          .stride_e_cand_b = p.e_cand.strides[0],
          .stride_e_cand_k = p.e_cand.strides[1],
          .stride_e_cand_n = p.e_cand.strides[2],
          .stride_w_user_m = p.w_user.strides[1],
          .stride_w_user_k = p.w_user.strides[2],
          .stride_w_cand_m = p.w_cand.strides[1],
          .stride_w_cand_k = p.w_cand.strides[2]};
}

std::vector<std::int32_t> shuffled_index(const GenericCase& c) {
  std::vector<std::int32_t> index(static_cast<std::size_t>(c.num_candidates));
  for (std::size_t b = 0; b < index.size(); ++b) {
    index[b] = static_cast<std::int32_t>(b * 2654435761u % static_cast<unsigned>(c.num_users));
  }
  return index;
}

class LceGenericTest : public testing::TestWithParam<GenericCase> {};

TEST_P(LceGenericTest, MatchesFp64Reference) {
  const GenericCase& c = GetParam();
  const OperandMemory e_user({c.num_users, c.k_user, c.n}, c.e, c.dtype, 1);
  const OperandMemory e_cand({c.num_candidates, c.k_cand, c.n}, c.e, c.dtype, 2);
  const OperandMemory w_user({1, c.m, c.k_user}, c.w, c.dtype, 3);
  const OperandMemory w_cand({1, c.m, c.k_cand}, c.w, c.dtype, 4);
  const OperandMemory bias({1, 1, c.m}, Layout::kContiguous, c.dtype, 5);
  const std::vector<std::int32_t> host_index = shuffled_index(c);
  const GuardedBuffer index(host_index.size() * sizeof(std::int32_t));
  ASSERT_EQ(cudaMemcpy(index.data(), host_index.data(), index.bytes(), cudaMemcpyHostToDevice),
            cudaSuccess);
  const GuardedBuffer out(static_cast<std::size_t>(c.num_candidates) * c.m * c.n *
                          size_of(c.dtype));
  const Problem problem{.e_user = e_user.operand(),
                        .e_cand = e_cand.operand(),
                        .w_user = w_user.operand(),
                        .w_cand = w_cand.operand(),
                        .bias = c.has_bias ? bias.operand().data : nullptr,
                        .cand_to_user = index.data<std::int32_t>(),
                        .out = out.data()};

  LceParams params = make_params(c, problem, out.data());
  const DeviceLimits limits = query_device_limits(0);
  LceConfig config = lce_impl::select_generic_config(params, limits);
  config.tile_m = config.user_tile_m = c.tile;
  const GuardedBuffer workspace(lce_workspace_bytes(params, config));
  params.workspace = workspace.data();
  lce(params, config, limits, nullptr);

  const GuardedBuffer device_wrong(sizeof(Wrong));
  Wrong wrong{.count = 0, .first = ~0ull};
  ASSERT_EQ(cudaMemcpy(device_wrong.data(), &wrong, sizeof(wrong), cudaMemcpyHostToDevice),
            cudaSuccess);
  const double unit_roundoff = c.dtype == DType::kFloat16    ? 1.0 / 2048
                               : c.dtype == DType::kBFloat16 ? 1.0 / 256
                                                             : 1.0 / 16777216;
  compare_kernel<<<2048, 256>>>(problem, unit_roundoff, device_wrong.data<Wrong>());
  ASSERT_EQ(cudaMemcpy(&wrong, device_wrong.data(), sizeof(wrong), cudaMemcpyDeviceToHost),
            cudaSuccess)
      << to_string(config);
  EXPECT_EQ(wrong.count, 0u) << to_string(config) << ": wrong elements of out, the first is "
                             << wrong.first;
  EXPECT_TRUE(out.guards_are_intact()) << to_string(config);
  EXPECT_TRUE(workspace.guards_are_intact()) << to_string(config);
}

constexpr std::array kDtypes{DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr std::array kTiles{lce_impl::kSmallTile, lce_impl::kLargeTile};

// Every layout of E with every layout of W, in every type and tile: the sizes end inside a tile, a
// block of K and a copy.
std::vector<GenericCase> layout_cases() {
  std::vector<GenericCase> all;
  for (const DType dtype : kDtypes) {
    for (std::size_t e = 0; e < kLayoutNames.size(); ++e) {
      for (std::size_t w = 0; w < kLayoutNames.size(); ++w) {
        const int tile = kTiles[(e + w) % 2];
        all.push_back({.num_users = 3,
                       .num_candidates = 7,
                       .m = 70,
                       .n = (e + w) % 3 == 0   ? 24
                            : (e + w) % 3 == 1 ? 22
                                               : 21,
                       .k_user = 35,
                       .k_cand = (e + w) % 2 == 0 ? 72 : 49,
                       .dtype = dtype,
                       .e = static_cast<Layout>(e),
                       .w = static_cast<Layout>(w),
                       .tile = tile,
                       .has_bias = w != 0});
      }
    }
  }
  return all;
}

// Sizes at and around the edges of tiles, blocks and copies.
std::vector<GenericCase> size_cases() {
  constexpr int kSizes[][6] = {{1, 1, 1, 1, 1, 1},       {2, 5, 3, 1, 4, 6},
                               {2, 5, 130, 13, 0, 65},   {2, 5, 130, 16, 65, 0},
                               {2, 5, 1, 64, 31, 33},    {3, 4, 64, 64, 64, 64},
                               {3, 5, 129, 127, 95, 97}, {1, 2, 433, 66, 178, 131}};
  std::vector<GenericCase> all;
  for (const DType dtype : kDtypes) {
    for (const auto& s : kSizes) {
      for (const int tile : kTiles) {
        all.push_back({.num_users = s[0],
                       .num_candidates = s[1],
                       .m = s[2],
                       .n = s[3],
                       .k_user = s[4],
                       .k_cand = s[5],
                       .dtype = dtype,
                       .tile = tile});
      }
    }
  }
  return all;
}

// Many candidates; in the last, offsets of E and of the output past 2^31 elements.
std::vector<GenericCase> large_cases() {
  std::vector<GenericCase> all;
  for (const DType dtype : kDtypes) {
    for (const int tile : kTiles) {
      all.push_back({.num_users = 1000,
                     .num_candidates = 100000,
                     .m = 9,
                     .n = 10,
                     .k_user = 40,
                     .k_cand = 11,
                     .dtype = dtype,
                     .tile = tile});
      if (dtype == DType::kBFloat16) continue;  // the same kernel as fp16, but for the product
      all.push_back({.num_users = 30,
                     .num_candidates = 66000,
                     .m = 130,
                     .n = 256,
                     .k_user = 3,
                     .k_cand = 130,
                     .dtype = dtype,
                     .tile = tile});
    }
  }
  return all;
}

std::string name_of_case(const testing::TestParamInfo<GenericCase>& info) {
  return info.param.id();
}

INSTANTIATE_TEST_SUITE_P(SmallLayouts, LceGenericTest, testing::ValuesIn(layout_cases()),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(SmallSizes, LceGenericTest, testing::ValuesIn(size_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Large, LceGenericTest, testing::ValuesIn(large_cases()), name_of_case);

}  // namespace
}  // namespace ikbo::test
