// SPDX-License-Identifier: Apache-2.0
// Packs a weight [M, K] into the shared-memory image that lce_sm90 loads with plain bulk copies:
// [num_tiles_m][num_blocks_k] tiles of kTileM rows x 32 k, 64 B a row, 16-byte chunk c of row r at
// c ^ (r / 2 % 4) (the 64-byte swizzle); zero outside [M, K]. Each part of a list fills whole
// blocks.
#pragma once

#include <cstdint>

#include "kernels/device/ptx_tma.cuh"
#include "kernels/lce/lce_layout.h"

namespace ikbo::lce_impl {

struct PackPart {
  const std::uint16_t* w;  // [M, K_i]
  int k;
  int first_block;
};

template <int kMaxParts>
struct PackArgs {
  uint4* packed;
  std::int64_t num_chunks;  // of 16 B, in `packed`
  std::int64_t stride_m;
  std::int64_t stride_k;
  int num_blocks_k;  // of all parts
  int num_parts;
  PackPart parts[kMaxParts];
};

template <int kMaxParts>
__device__ __forceinline__ void pack_chunk(const PackArgs<kMaxParts>& args, int m, int tile_m,
                                           std::int64_t chunk) {
  constexpr int kChunksPerRow = kBlockK / 8;
  const int position = static_cast<int>(chunk % kChunksPerRow);
  const std::int64_t row_in_all = chunk / kChunksPerRow;
  const int row = static_cast<int>(row_in_all % tile_m);
  const std::int64_t tile = row_in_all / tile_m;
  const int block_k = static_cast<int>(tile % args.num_blocks_k);
  const int row_m = static_cast<int>(tile / args.num_blocks_k) * tile_m + row;
  int at = args.num_parts - 1;
  while (args.parts[at].first_block > block_k) --at;
  const PackPart& part = args.parts[at];
  const int first_k = (block_k - part.first_block) * kBlockK + (position ^ (row / 2 % 4)) * 8;

  alignas(16) std::uint16_t values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int k = first_k + i;
    values[i] = row_m < m && k < part.k ? part.w[row_m * args.stride_m + k * args.stride_k]
                                        : std::uint16_t{0};
  }
  args.packed[chunk] = *reinterpret_cast<const uint4*>(values);
}

// Both weights of a call in one launch; one thread writes one chunk.
__global__ void lce_pack_kernel(const __grid_constant__ PackArgs<1> user,
                                const __grid_constant__ PackArgs<lce_max_parts> cand, int m,
                                int tile_m) {
  device::grid_dependency_launch();
  const std::int64_t chunk = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (chunk < user.num_chunks) {
    pack_chunk(user, m, tile_m, chunk);
  } else if (chunk < user.num_chunks + cand.num_chunks) {
    pack_chunk(cand, m, tile_m, chunk - user.num_chunks);
  }
}

}  // namespace ikbo::lce_impl
