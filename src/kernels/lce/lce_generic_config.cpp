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

LceConfig select_generic_config(const LceParams& p, const DeviceLimits& limits) {
  const bool is_mma = size_of(p.dtype) == 2;
  // In lce_mma, copies of single elements leave no registers for a large tile.
  const bool user_singles =
      copy_width(p.e_user, p.stride_e_user_n, p.n, p.stride_e_user_u, p.stride_e_user_k) == 1 ||
      copy_width(p.w_user, p.stride_w_user_k, p.k_user, p.stride_w_user_m, 0) == 1;
  const bool cand_singles =
      copy_width(p.e_cand, p.stride_e_cand_n, p.n, p.stride_e_cand_b, p.stride_e_cand_k) == 1 ||
      copy_width(p.w_cand, p.stride_w_cand_k, p.k_cand, p.stride_w_cand_m, 0) == 1;
  const auto tile = [&](bool has_singles, std::int64_t batch) {
    return is_mma && has_singles ? kSmallTile : select_tile(p.m, batch * p.n, limits.num_sms);
  };
  return {.kernel = is_mma ? LceKernel::kMma : LceKernel::kSimt,
          .tile_m = tile(cand_singles, p.num_candidates),
          .user_tile_m = tile(user_singles, p.num_users)};
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
