// SPDX-License-Identifier: Apache-2.0
#include "kernels/lce/lce_generic.h"

namespace ikbo::lce_impl {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Edge of the square tiles that cover M x `columns` soonest. An SM holds two large tiles or four
// small ones at a time; a small tile needs a quarter of the work, at 0.8 of the rate.
int select_tile(std::int64_t m, std::int64_t columns, int num_sms) {
  const auto waves = [&](int tile, int tiles_per_sm) {
    return ceil_div(ceil_div(m, tile) * ceil_div(columns, tile),
                    std::int64_t{num_sms} * tiles_per_sm);
  };
  return 8 * waves(kLargeTile, 2) <= 5 * waves(kSmallTile, 4) ? kLargeTile : kSmallTile;
}

}  // namespace

LceConfig select_generic_config(const LceParams& params, const DeviceLimits& limits) {
  if (size_of(params.dtype) != 2) return {.kernel = LceKernel::kSimt};
  const auto tile = [&](std::int64_t batch) {
    return select_tile(params.m, batch * params.n, limits.num_sms);
  };
  return {.kernel = LceKernel::kMma,
          .tile_m = tile(params.num_candidates),
          .user_tile_m = tile(params.num_users)};
}

int copy_width(const void* data, std::int64_t stride, std::int64_t row, std::int64_t other_stride_0,
               std::int64_t other_stride_1) {
  if (stride != 1) return 1;
  for (const int width : {8, 2}) {
    if (reinterpret_cast<std::uintptr_t>(data) % (2 * width) == 0 && row % width == 0 &&
        other_stride_0 % width == 0 && other_stride_1 % width == 0) {
      return width;
    }
  }
  return 1;
}

}  // namespace ikbo::lce_impl
