// SPDX-License-Identifier: Apache-2.0
// Sizes shared by the host and the device side of the LCE kernels, and the workspace's layout.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ikbo/lce.h"

namespace ikbo::lce_impl {

inline constexpr int kBlockK = 32;    // k per pipeline stage: one 64-byte swizzled row of 16-bit
inline constexpr int kSliceN = 64;    // columns of N per warpgroup tile
inline constexpr int kThreads = 128;  // threads of a warpgroup
inline constexpr int kPackedRowBytes = 512;  // a packed weight is loaded as rows of this many bytes
inline constexpr std::array<int, 6> kTileWidths = {64, 128, 160, 192, 224, 256};

// How the CTAs of a stage share its work. An item is one chunk of the batch x one tile of M x
// `slices_per_cta` slices of N; a CTA takes whole items.
struct LceSplit {
  int chunk_size = 0;      // entries of the batch
  int slices_per_cta = 1;  // consumers, or 1: then the consumers take neighbours in the batch
  int num_items = 0;
};

// Pure. The fewest rounds of tiles, then the longest chunks.
LceSplit split_lce(int batch, int num_slices, int num_tiles_m, int consumers, int num_sms);

// The candidate side as a list; `one` holds it where the caller gave a single tensor.
std::span<const LcePart> candidate_parts(const LceParams& params, LcePart& one);

// k of the candidate side in a packed weight, where each part fills whole blocks.
int padded_k_cand(const LceParams& params);

struct WorkspaceLayout {
  std::size_t user_partial = 0;   // fp32, see lce_sm90.cuh / lce_simt.cuh for the order
  std::size_t w_user_packed = 0;  // offsets in bytes
  std::size_t w_cand_packed = 0;
  std::size_t total_bytes = 0;
};

inline WorkspaceLayout make_workspace_layout(const LceParams& params, const LceConfig& config) {
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const bool is_sm90 = config.kernel == LceKernel::kSm90;
  const std::size_t columns =
      is_sm90 ? static_cast<std::size_t>((params.n + kSliceN - 1) / kSliceN) * kSliceN : params.n;
  const std::size_t rows =
      is_sm90 ? static_cast<std::size_t>(config.num_tiles_m) * config.tile_m : params.m;

  WorkspaceLayout layout;
  layout.w_user_packed =
      config.dual_k ? 0 : align(params.num_users * rows * columns * sizeof(float));
  layout.w_cand_packed =
      layout.w_user_packed +
      (params.w_user_packed == nullptr ? align(lce_packed_bytes(params.k_user, config)) : 0);
  layout.total_bytes =
      layout.w_cand_packed + (params.w_cand_packed == nullptr
                                  ? align(lce_packed_bytes(padded_k_cand(params), config))
                                  : 0);
  return layout;
}

}  // namespace ikbo::lce_impl
