// SPDX-License-Identifier: Apache-2.0
// Packs a weight [M, K] into the shared-memory image that lce_sm90 loads with plain bulk copies:
// [num_tiles_m][num_blocks_k] tiles of kTileM rows x 32 k, 64 B a row, 16-byte chunk c of row r at
// c ^ (r / 2 % 4) (the 64-byte swizzle); zero outside [M, K].
#pragma once

#include <cstdint>

#include "kernels/lce/lce_layout.h"

namespace ikbo::lce_impl {

// One thread writes one 16-byte chunk.
__global__ void lce_pack_kernel(const std::uint16_t* __restrict__ g_w, std::int64_t stride_m,
                                std::int64_t stride_k, int m, int k, int tile_m, int num_blocks_k,
                                std::int64_t num_chunks, uint4* __restrict__ g_packed) {
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (chunk >= num_chunks) return;
  constexpr int kChunksPerRow = kBlockK / 8;
  const int position = static_cast<int>(chunk % kChunksPerRow);
  const std::int64_t row_in_all = chunk / kChunksPerRow;
  const int row = static_cast<int>(row_in_all % tile_m);
  const std::int64_t tile = row_in_all / tile_m;
  const int block_k = static_cast<int>(tile % num_blocks_k);
  const int row_m = static_cast<int>(tile / num_blocks_k) * tile_m + row;
  const int first_k = block_k * kBlockK + (position ^ (row / 2 % 4)) * 8;

  alignas(16) std::uint16_t values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at_k = first_k + i;
    values[i] = row_m < m && at_k < k ? g_w[row_m * stride_m + at_k * stride_k] : std::uint16_t{0};
  }
  g_packed[chunk] = *reinterpret_cast<const uint4*>(values);
}

}  // namespace ikbo::lce_impl
