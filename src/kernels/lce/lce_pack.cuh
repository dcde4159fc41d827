// SPDX-License-Identifier: Apache-2.0
// Packs a weight [M, K] into the shared-memory image that lce_sm90 loads with plain bulk copies:
// [num_tiles_m][num_blocks_k] tiles of kTileM rows x 32 k, 64 B a row, 16-byte chunk c of row r at
// c ^ (r / 2 % 4) (the 64-byte swizzle); zero outside [M, K].
#pragma once

#include <cstdint>

#include "kernels/device/ptx_tma.cuh"
#include "kernels/lce/lce_layout.h"

namespace ikbo::lce_impl {

struct PackArgs {
  const std::uint16_t* w;  // [M, K]
  uint4* packed;
  std::int64_t stride_m;
  std::int64_t stride_k;
  std::int64_t num_chunks;  // of 16 B, in `packed`
  int k;
  int num_blocks_k;
};

__device__ __forceinline__ void pack_chunk(const PackArgs& args, int m, int tile_m,
                                           std::int64_t chunk) {
  constexpr int kChunksPerRow = kBlockK / 8;
  const int position = static_cast<int>(chunk % kChunksPerRow);
  const std::int64_t row_in_all = chunk / kChunksPerRow;
  const int row = static_cast<int>(row_in_all % tile_m);
  const std::int64_t tile = row_in_all / tile_m;
  const int block_k = static_cast<int>(tile % args.num_blocks_k);
  const int row_m = static_cast<int>(tile / args.num_blocks_k) * tile_m + row;
  const int first_k = block_k * kBlockK + (position ^ (row / 2 % 4)) * 8;

  alignas(16) std::uint16_t values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at_k = first_k + i;
    values[i] = row_m < m && at_k < args.k ? args.w[row_m * args.stride_m + at_k * args.stride_k]
                                           : std::uint16_t{0};
  }
  args.packed[chunk] = *reinterpret_cast<const uint4*>(values);
}

// Both weights of a call in one launch; one thread writes one chunk.
__global__ void lce_pack_kernel(const PackArgs first, const PackArgs second, int m, int tile_m) {
  device::grid_dependency_launch();
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (chunk < first.num_chunks) {
    pack_chunk(first, m, tile_m, chunk);
  } else if (chunk < first.num_chunks + second.num_chunks) {
    pack_chunk(second, m, tile_m, chunk - first.num_chunks);
  }
}

}  // namespace ikbo::lce_impl
