// SPDX-License-Identifier: Apache-2.0
// LCE in fp32: 64 x 64 output tiles of plain multiply-adds, 4 x 4 to a thread, which loads block
// k + 1 while it works on block k.
#pragma once

#include <cstdint>

#include "kernels/lce/lce_columns.cuh"
#include "kernels/lce/lce_generic.h"

namespace ikbo::lce_impl {

inline constexpr int kSimtBlockK = 16;
inline constexpr int kSimtThreads = 256;  // 16 x 16
inline constexpr int kSimtCopies = kSimtBlockK * kSmallTile / kSimtThreads;

struct SimtShared {
  alignas(16) float w[2][kSimtBlockK][kSmallTile];
  alignas(16) float e[2][kSimtBlockK][kSmallTile];
  Column columns[kSmallTile];
};

// One block of both operands in this thread's registers.
struct SimtBlock {
  float w[kSimtCopies];
  float e[kSimtCopies];
};

// Element i of a block: row i % 64 of w's tile and column i % 64 of e's, both at k = i / 64.
__device__ __forceinline__ void simt_fetch(SimtBlock& block, const StageArgs& args,
                                           const SimtShared& shared, std::int64_t first_m,
                                           int first_k) {
#pragma unroll
  for (int i = 0; i < kSimtCopies; ++i) {
    const int element = static_cast<int>(threadIdx.x) + i * kSimtThreads;
    const std::int64_t at_m = first_m + element % kSmallTile;
    const int at_k = element / kSmallTile;  // after first_k
    const Column& column = shared.columns[element % kSmallTile];
    const bool has_k = at_k < args.k - first_k;
    block.w[i] = has_k && at_m < args.m
                     ? static_cast<const float*>(
                           args.w)[at_m * args.stride_w_m + (first_k + at_k) * args.stride_w_k]
                     : 0.0f;
    block.e[i] =
        has_k && column.out >= 0
            ? static_cast<const float*>(args.e)[column.e + (first_k + at_k) * args.stride_e_k]
            : 0.0f;
  }
}

__device__ __forceinline__ void simt_store(SimtShared& shared, int buffer, const SimtBlock& block) {
#pragma unroll
  for (int i = 0; i < kSimtCopies; ++i) {
    const int element = static_cast<int>(threadIdx.x) + i * kSimtThreads;
    shared.w[buffer][element / kSmallTile][element % kSmallTile] = block.w[i];
    shared.e[buffer][element / kSmallTile][element % kSmallTile] = block.e[i];
  }
}

__device__ __forceinline__ void simt_multiply(float (&acc)[4][4], const SimtShared& shared,
                                              int buffer, int row, int column) {
#pragma unroll
  for (int k = 0; k < kSimtBlockK; ++k) {
    const float4 w4 = *reinterpret_cast<const float4*>(&shared.w[buffer][k][row * 4]);
    const float4 e4 = *reinterpret_cast<const float4*>(&shared.e[buffer][k][column * 4]);
    const float w[4] = {w4.x, w4.y, w4.z, w4.w};
    const float e[4] = {e4.x, e4.y, e4.z, e4.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(w[i], e[j], acc[i][j]);
    }
  }
}

__device__ __forceinline__ void simt_write(const StageArgs& args, const SimtShared& shared,
                                           const float (&acc)[4][4], std::int64_t first_row,
                                           int column) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Column at = shared.columns[column * 4 + j];
    if (at.out < 0) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t row = first_row + i;
      if (row >= args.m) continue;
      float user_part = args.bias != nullptr ? static_cast<const float*>(args.bias)[row] : 0.0f;
      if (args.add != nullptr) user_part = args.add[at.add + row * args.n];
      static_cast<float*>(args.out)[at.out + row * args.n] = acc[i][j] + user_part;
    }
  }
}

__global__ void __launch_bounds__(kSimtThreads) lce_simt_kernel(const StageArgs args) {
  __shared__ SimtShared shared;
  const std::int64_t tiles_m = (std::int64_t{args.m} + kSmallTile - 1) / kSmallTile;
  const std::int64_t num_tiles = tiles_m * ((args.num_columns + kSmallTile - 1) / kSmallTile);
  const int num_blocks = static_cast<int>((std::int64_t{args.k} + kSimtBlockK - 1) / kSimtBlockK);
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 16;
  const int column = thread % 16;

  for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const std::int64_t first_m = tile % tiles_m * kSmallTile;
    if (thread < kSmallTile) {
      shared.columns[thread] = locate_column(args, tile / tiles_m * kSmallTile + thread);
    }
    __syncthreads();  // `columns` are there
    float acc[4][4] = {};
    SimtBlock block;
    if (num_blocks > 0) {
      simt_fetch(block, args, shared, first_m, 0);
      simt_store(shared, 0, block);
    }
    for (int i = 0; i < num_blocks; ++i) {
      __syncthreads();  // buffer i % 2 is full, and nobody reads the other
      const bool has_next = i + 1 < num_blocks;
      if (has_next) simt_fetch(block, args, shared, first_m, (i + 1) * kSimtBlockK);
      simt_multiply(acc, shared, i % 2, row, column);
      if (has_next) simt_store(shared, (i + 1) % 2, block);
    }
    simt_write(args, shared, acc, first_m + row * 4, column);
    __syncthreads();  // the next tile overwrites `columns` and the buffers
  }
}

}  // namespace ikbo::lce_impl
