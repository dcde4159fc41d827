// SPDX-License-Identifier: Apache-2.0
// Sizes shared by the host and the device side of linear_sm90, and the workspace's layout.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "ikbo/linear.h"

namespace ikbo::linear_impl {

inline constexpr int kBlockK = 64;    // k per pipeline stage: one 128-byte swizzled row of 16-bit
inline constexpr int kThreads = 128;  // threads of a warpgroup
inline constexpr std::array<int, 6> kTileWidths = {64, 128, 160, 192, 224, 256};

template <typename T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Row stride of a weight's copy in the workspace.
constexpr std::int64_t copied_stride(int k) { return ceil_div<std::int64_t>(k, 8) * 8; }

// Columns of the user partial [U, columns], fp32: M padded to whole tiles of both stages.
inline std::int64_t partial_columns(const LinearParams& params, const LinearConfig& config) {
  if (config.kernel == LinearKernel::kSimt) return params.m;
  const auto padded = [&](int tile) { return ceil_div<std::int64_t>(params.m, tile) * tile; };
  return std::max(padded(config.user.tile_m), padded(config.candidate.tile_m));
}

struct WorkspaceLayout {
  std::size_t user_partial = 0;  // offsets in bytes
  std::size_t w_user_copy = 0;
  std::size_t w_cand_copy = 0;
  std::size_t total_bytes = 0;
};

inline WorkspaceLayout make_workspace_layout(const LinearParams& params,
                                             const LinearConfig& config) {
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const auto copy_bytes = [&](LinearFeed feed, int k) {
    return feed == LinearFeed::kCopied
               ? align(static_cast<std::size_t>(params.m) * copied_stride(k) * 2)
               : 0;
  };
  WorkspaceLayout layout;
  layout.w_user_copy = align(static_cast<std::size_t>(params.num_users) *
                             partial_columns(params, config) * sizeof(float));
  layout.w_cand_copy = layout.w_user_copy + copy_bytes(config.w_user, params.k_user);
  layout.total_bytes = layout.w_cand_copy + copy_bytes(config.w_cand, params.k_cand);
  return layout;
}

}  // namespace ikbo::linear_impl
