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
  const void* data;
  std::int64_t rows;
  std::int64_t k;
  std::int64_t stride_row;
  std::int64_t stride_k;
};

// Rows whose elements are neighbours; a single row has any stride.
bool has_dense_rows(const Matrix& x) { return x.stride_k == 1 || x.k == 1; }

// Whether every row starts at a multiple of `bytes`.
bool is_aligned(const Matrix& x, int bytes) {
  return reinterpret_cast<std::uintptr_t>(x.data) % bytes == 0 &&
         (x.rows == 1 || x.stride_row * 2 % bytes == 0);
}

LinearFeed feed_of_x(const Matrix& x) {
  // The copy engine wants positive strides below 2^40 bytes.
  const bool has_tma_stride = x.rows == 1 || (x.stride_row > 0 && x.stride_row < 1LL << 39);
  if (is_aligned(x, 16) && has_tma_stride) return LinearFeed::kTma;
  return is_aligned(x, 4) ? LinearFeed::kAsync : LinearFeed::kElement;
}

// A copy costs a launch. It is worth that where many tiles read the weight, and needed where the
// threads are not to copy it too.
LinearFeed feed_of_w(const Matrix& w, LinearFeed x, const LinearTiling& tiling) {
  if (!has_dense_rows(w)) return LinearFeed::kCopied;
  const LinearFeed feed = feed_of_x(w);
  if (feed == LinearFeed::kTma) return feed;
  const bool is_copied =
      feed == LinearFeed::kElement || x == LinearFeed::kElement || tiling.tile_rows == 128;
  return is_copied ? LinearFeed::kCopied : feed;
}

// Rows x M outputs, each a sum over k.
struct Stage {
  std::int64_t rows;
  std::int64_t m;
  std::int64_t k;

  std::int64_t num_ctas(const LinearTiling& tiling) const {
    return ceil_div<std::int64_t>(rows, tiling.tile_rows) *
           ceil_div<std::int64_t>(m, tiling.tile_m) * tiling.split_k;
  }
};

// Clocks that the CTAs of a tiling run. One SM takes in some 35 bytes a clock from L2; a matrix
// instruction of 64 x n x 16 takes n / 2 clocks. The rest are latencies: start and first bytes, the
// exchange of a cluster's sums, a tile's epilogue. Set by the times of every tiling at 22 shapes on
// an H200 (2026-11).
double clocks_of(const Stage& stage, const LinearTiling& tiling, const DeviceLimits& limits) {
  constexpr double kBytesPerClock = 35;
  constexpr double kStart = 2000;
  constexpr double kExchange = 1000;
  const std::int64_t blocks =
      ceil_div(ceil_div<std::int64_t>(stage.k, kBlockK), std::int64_t{tiling.split_k});
  const double bytes = (tiling.tile_rows + tiling.tile_m) * kBlockK * 2.0;
  const double clocks_per_block =
      std::max(bytes / kBytesPerClock, tiling.tile_rows * tiling.tile_m / 32.0);
  const double epilogue = 300 + tiling.tile_rows * tiling.tile_m / 24.0;
  const auto tiles_per_sm =
      static_cast<double>(ceil_div(stage.num_ctas(tiling), std::int64_t{limits.num_sms}));
  return kStart + (tiling.split_k > 1 ? kExchange : 0) +
         tiles_per_sm * (static_cast<double>(blocks) * clocks_per_block + epilogue);
}

// A CTA of 64 rows leaves room for another on its SM, one of 128 rows does not.
std::int64_t ctas_per_sm(const LinearTiling& tiling) { return tiling.tile_rows == 64 ? 2 : 1; }

// The tiling with the least clocks of a stage that is launched while `busy_ctas` CTAs run for
// another `busy_clocks`.
LinearTiling select_tiling(const Stage& stage, std::int64_t busy_ctas, double busy_clocks,
                           const DeviceLimits& limits) {
  LinearTiling best;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const LinearTiling& tiling) {
    const std::int64_t free_ctas = ctas_per_sm(tiling) * limits.num_sms - busy_ctas;
    const double wait = stage.num_ctas(tiling) > free_ctas ? busy_clocks : 0;
    const double clocks = wait + clocks_of(stage, tiling, limits);
    if (clocks < least) {
      least = clocks;
      best = tiling;
    }
  };
  for (const int tile_m : linear_impl::kTileWidths) {
    consider({.tile_rows = 128, .tile_m = tile_m, .split_k = 1});
  }
  const std::int64_t blocks = ceil_div<std::int64_t>(stage.k, kBlockK);
  for (const int split_k : {1, 2, 4, 8}) {
    const LinearTiling tiling{.tile_rows = 64, .tile_m = 64, .split_k = split_k};
    // Every CTA of a cluster has a share of k. Half of the SMs: clusters are slow to find a place
    // beside the other stage.
    const bool is_possible =
        split_k == 1 || (split_k <= blocks && stage.num_ctas(tiling) <= limits.num_sms / 2);
    if (is_possible) consider(tiling);
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
  const auto add = [&text](const char* name, LinearFeed feed) {
    constexpr const char* kNames[] = {"tma", "async", "element", "copied"};
    if (feed != LinearFeed::kTma)
      text += std::string(",") + name + "=" + kNames[static_cast<int>(feed)];
  };
  add("x_user", config.x_user);
  add("x_cand", config.x_cand);
  add("w_user", config.w_user);
  add("w_cand", config.w_cand);
  return text + ">";
}

LinearConfig select_linear_config(const LinearParams& p, const DeviceLimits& limits) {
  const bool is_16_bit = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const bool has_work =
      p.num_users > 0 && p.num_candidates > 0 && p.m > 0 && p.k_user > 0 && p.k_cand > 0;
  const Matrix x_user{p.x_user, p.num_users, p.k_user, p.stride_x_user_u, p.stride_x_user_k};
  const Matrix x_cand{p.x_cand, p.num_candidates, p.k_cand, p.stride_x_cand_b, p.stride_x_cand_k};
  const Matrix w_user{p.w_user, p.m, p.k_user, p.stride_w_user_m, p.stride_w_user_k};
  const Matrix w_cand{p.w_cand, p.m, p.k_cand, p.stride_w_cand_m, p.stride_w_cand_k};
  if (limits.compute_capability != 90 || !is_16_bit || !has_work || !has_dense_rows(x_user) ||
      !has_dense_rows(x_cand)) {
    return {};
  }
  const Stage user{p.num_users, p.m, p.k_user};
  const Stage candidate{p.num_candidates, p.m, p.k_cand};
  LinearConfig config;
  config.kernel = LinearKernel::kSm90;
  config.user = select_tiling(user, 0, 0, limits);
  config.candidate =
      select_tiling(candidate, std::min<std::int64_t>(user.num_ctas(config.user), limits.num_sms),
                    clocks_of(user, config.user, limits), limits);
  config.x_user = feed_of_x(x_user);
  config.x_cand = feed_of_x(x_cand);
  config.w_user = feed_of_w(w_user, config.x_user, config.user);
  config.w_cand = feed_of_w(w_cand, config.x_cand, config.candidate);
  return config;
}

std::size_t linear_workspace_bytes(const LinearParams& params, const LinearConfig& config) {
  return linear_impl::make_workspace_layout(params, config).total_bytes;
}

}  // namespace ikbo
