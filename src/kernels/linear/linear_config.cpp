// SPDX-License-Identifier: Apache-2.0
// Which kernel and which tiles linear runs with, by an estimate of clocks.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <sstream>

#include "ikbo/linear.h"
#include "kernels/linear/linear_layout.h"

namespace ikbo {
namespace {

using linear_impl::ceil_div;
using linear_impl::kBlockK;

struct Matrix {
  std::int64_t rows;
  std::int64_t k;
  std::int64_t stride_row;
  std::int64_t stride_k;
};

// The copy engine counts elements along a group of rows in 31 bits.
constexpr std::int64_t kMaxGroupElements = std::numeric_limits<std::int32_t>::max() / 2;

// Rows whose elements are neighbours, the rows in order and apart; a single row has any stride.
bool has_dense_rows(const Matrix& x) {
  return (x.stride_k == 1 || x.k == 1) && x.k <= kMaxGroupElements &&
         (x.rows == 1 || (x.stride_row >= x.k && x.stride_row <= kMaxGroupElements / 8));
}

// Four rows of a weight must have a stride of 16 bytes.
bool needs_copy(const Matrix& w) {
  return !has_dense_rows(w) || (w.rows > 1 && linear_impl::rows_per_group(w.stride_row) > 4);
}

// Clocks of a stage with a tiling. One SM takes in some 50 bytes a clock from L2; a matrix
// instruction of 64 x n x 16 takes n / 2 clocks. The rest are latencies: start, first bytes, the
// exchange of a cluster's sums, and a tile's epilogue.
double estimate(const LinearTiling& tiling, std::int64_t rows, std::int64_t m, std::int64_t k,
                const DeviceLimits& limits) {
  constexpr double kBytesPerClock = 50;
  constexpr double kStart = 2000;
  constexpr double kExchange = 1000;
  const std::int64_t tiles =
      ceil_div<std::int64_t>(rows, tiling.tile_rows) * ceil_div<std::int64_t>(m, tiling.tile_m);
  const std::int64_t blocks =
      ceil_div(ceil_div<std::int64_t>(k, kBlockK), std::int64_t{tiling.split_k});
  const double bytes = (tiling.tile_rows + tiling.tile_m) * kBlockK * 2.0;
  const double clocks_per_block =
      std::max(bytes / kBytesPerClock, tiling.tile_rows * tiling.tile_m / 32.0);
  const double epilogue = 300 + tiling.tile_rows * tiling.tile_m / 24.0;
  const auto tiles_per_sm =
      static_cast<double>(ceil_div(tiles * tiling.split_k, std::int64_t{limits.num_sms}));
  return kStart + (tiling.split_k > 1 ? kExchange : 0) +
         tiles_per_sm * (static_cast<double>(blocks) * clocks_per_block + epilogue);
}

LinearTiling select_tiling(std::int64_t rows, std::int64_t m, std::int64_t k,
                           const DeviceLimits& limits) {
  LinearTiling best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const LinearTiling& tiling) {
    const double clocks = estimate(tiling, rows, m, k, limits);
    if (clocks < least) {
      least = clocks;
      best = tiling;
    }
  };
  for (const int tile_m : linear_impl::kTileWidths) {
    consider({.tile_rows = 128, .tile_m = tile_m, .split_k = 1});
  }
  const std::int64_t tiles = ceil_div<std::int64_t>(rows, 64) * ceil_div<std::int64_t>(m, 64);
  const std::int64_t blocks = ceil_div<std::int64_t>(k, kBlockK);
  for (const int split_k : {1, 2, 4, 8}) {
    // Every CTA of a cluster has a share of k, and all clusters run at once.
    const bool is_possible =
        split_k <= blocks && (split_k == 1 || tiles * split_k <= 2 * limits.num_sms);
    if (is_possible) consider({.tile_rows = 64, .tile_m = 64, .split_k = split_k});
  }
  return best;
}

std::string to_string(const LinearTiling& tiling) {
  std::ostringstream text;
  text << tiling.tile_rows << "x" << tiling.tile_m;
  if (tiling.split_k > 1) text << "/" << tiling.split_k;
  return text.str();
}

}  // namespace

std::string to_string(const LinearConfig& config) {
  if (config.kernel == LinearKernel::kSimt) return "linear_simt";
  std::string text =
      "linear_sm90<user=" + to_string(config.user) + ",cand=" + to_string(config.candidate);
  if (config.copies_w_user) text += ",copies w_user";
  if (config.copies_w_cand) text += ",copies w_cand";
  return text + ">";
}

LinearConfig select_linear_config(const LinearParams& p, const DeviceLimits& limits) {
  const bool is_16_bit = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const bool has_work =
      p.num_users > 0 && p.num_candidates > 0 && p.m > 0 && p.k_user > 0 && p.k_cand > 0;
  const Matrix x_user{p.num_users, p.k_user, p.stride_x_user_u, p.stride_x_user_k};
  const Matrix x_cand{p.num_candidates, p.k_cand, p.stride_x_cand_b, p.stride_x_cand_k};
  if (limits.compute_capability != 90 || !is_16_bit || !has_work || !has_dense_rows(x_user) ||
      !has_dense_rows(x_cand)) {
    return {};
  }
  return {.kernel = LinearKernel::kSm90,
          .user = select_tiling(p.num_users, p.m, p.k_user, limits),
          .candidate = select_tiling(p.num_candidates, p.m, p.k_cand, limits),
          .copies_w_user = needs_copy({p.m, p.k_user, p.stride_w_user_m, p.stride_w_user_k}),
          .copies_w_cand = needs_copy({p.m, p.k_cand, p.stride_w_cand_m, p.stride_w_cand_k})};
}

std::size_t linear_workspace_bytes(const LinearParams& params, const LinearConfig& config) {
  return linear_impl::make_workspace_layout(params, config).total_bytes;
}

}  // namespace ikbo
