// SPDX-License-Identifier: Apache-2.0
// LCE in fp32: square output tiles of plain multiply-adds. A thread has 4 x 4 outputs in each
// 64 x 64 part of its tile and loads block k + 1 while it works on block k.
#pragma once

#include <cstdint>

#include "kernels/lce/lce_columns.cuh"
#include "kernels/lce/lce_generic.h"

namespace ikbo::lce_impl {

inline constexpr int kSimtThreads = 256;  // 16 x 16

template <int kTileEdge>
struct SimtTraits {
  static constexpr int kTile = kTileEdge;
  static constexpr int kParts = kTile / 64;  // along M and along the columns
  static constexpr int kBlockK = 16 / kParts;
  static constexpr int kOutputs = 4 * kParts;
  static constexpr int kCopies = kBlockK * kTile / kSimtThreads;

  struct Shared {
    alignas(16) float w[2][kBlockK][kTile];
    alignas(16) float e[2][kBlockK][kTile];
    Column columns[kTile];
  };
  // One block of both operands in this thread's registers.
  struct Block {
    float w[kCopies];
    float e[kCopies];
  };
  // Output i of thread row (or column) `thread` of 16.
  static __device__ __forceinline__ int output_at(int thread, int i) {
    return i / 4 * 64 + thread * 4 + i % 4;
  }
};

// Element i of a block: row i % kTile of w's tile and column i % kTile of e's, both at k = i /
// kTile.
template <typename Traits>
__device__ __forceinline__ void simt_fetch(typename Traits::Block& block, const StageArgs& args,
                                           const typename Traits::Shared& shared,
                                           std::int64_t first_m, int first_k) {
#pragma unroll
  for (int i = 0; i < Traits::kCopies; ++i) {
    const int element = static_cast<int>(threadIdx.x) + i * kSimtThreads;
    const std::int64_t at_m = first_m + element % Traits::kTile;
    const int k = element / Traits::kTile;
    const Column& column = shared.columns[element % Traits::kTile];
    const bool has_k = k < args.k - first_k;
    const auto* g_w = static_cast<const float*>(args.w);
    const auto* g_e = static_cast<const float*>(args.e);
    block.w[i] = has_k && at_m < args.m
                     ? g_w[at_m * args.stride_w_m + (first_k + k) * args.stride_w_k]
                     : 0.0f;
    block.e[i] = has_k && column.out >= 0 ? g_e[column.e + (first_k + k) * args.stride_e_k] : 0.0f;
  }
}

template <typename Traits>
__device__ __forceinline__ void simt_store(typename Traits::Shared& shared, int buffer,
                                           const typename Traits::Block& block) {
#pragma unroll
  for (int i = 0; i < Traits::kCopies; ++i) {
    const int element = static_cast<int>(threadIdx.x) + i * kSimtThreads;
    shared.w[buffer][element / Traits::kTile][element % Traits::kTile] = block.w[i];
    shared.e[buffer][element / Traits::kTile][element % Traits::kTile] = block.e[i];
  }
}

template <typename Traits>
__device__ __forceinline__ void simt_multiply(float (&acc)[Traits::kOutputs][Traits::kOutputs],
                                              const typename Traits::Shared& shared, int buffer,
                                              int row, int column) {
#pragma unroll 2
  for (int k = 0; k < Traits::kBlockK; ++k) {
    float w[Traits::kOutputs];
    float e[Traits::kOutputs];
#pragma unroll
    for (int i = 0; i < Traits::kOutputs; i += 4) {
      *reinterpret_cast<float4*>(w + i) =
          *reinterpret_cast<const float4*>(&shared.w[buffer][k][Traits::output_at(row, i)]);
      *reinterpret_cast<float4*>(e + i) =
          *reinterpret_cast<const float4*>(&shared.e[buffer][k][Traits::output_at(column, i)]);
    }
#pragma unroll
    for (int i = 0; i < Traits::kOutputs; ++i) {
#pragma unroll
      for (int j = 0; j < Traits::kOutputs; ++j) acc[i][j] = fmaf(w[i], e[j], acc[i][j]);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void simt_write(const StageArgs& args,
                                           const typename Traits::Shared& shared,
                                           const float (&acc)[Traits::kOutputs][Traits::kOutputs],
                                           std::int64_t first_m, int row, int column) {
#pragma unroll
  for (int j = 0; j < Traits::kOutputs; ++j) {
    const Column at = shared.columns[Traits::output_at(column, j)];
    if (at.out < 0) continue;
#pragma unroll
    for (int i = 0; i < Traits::kOutputs; ++i) {
      const std::int64_t at_m = first_m + Traits::output_at(row, i);
      if (at_m >= args.m) continue;
      float user_part = args.bias != nullptr ? static_cast<const float*>(args.bias)[at_m] : 0.0f;
      if (args.add != nullptr) user_part = args.add[at.add + at_m * args.n];
      static_cast<float*>(args.out)[at.out + at_m * args.n] = acc[i][j] + user_part;
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kSimtThreads, 2) lce_simt_kernel(const StageArgs args) {
  __shared__ typename Traits::Shared shared;
  constexpr int kTile = Traits::kTile;
  const std::int64_t tiles_m = (std::int64_t{args.m} + kTile - 1) / kTile;
  const std::int64_t num_tiles = tiles_m * ((args.num_columns + kTile - 1) / kTile);
  const int num_blocks =
      static_cast<int>((std::int64_t{args.k} + Traits::kBlockK - 1) / Traits::kBlockK);
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 16;
  const int column = thread % 16;

  for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const std::int64_t first_m = tile % tiles_m * kTile;
    if (thread < kTile) {
      shared.columns[thread] = locate_column(args, tile / tiles_m * kTile + thread);
    }
    __syncthreads();  // `columns` are there
    float acc[Traits::kOutputs][Traits::kOutputs] = {};
    typename Traits::Block block;
    if (num_blocks > 0) {
      simt_fetch<Traits>(block, args, shared, first_m, 0);
      simt_store<Traits>(shared, 0, block);
    }
    for (int i = 0; i < num_blocks; ++i) {
      __syncthreads();  // buffer i % 2 is full, and nobody reads the other
      const bool has_next = i + 1 < num_blocks;
      if (has_next) simt_fetch<Traits>(block, args, shared, first_m, (i + 1) * Traits::kBlockK);
      simt_multiply<Traits>(acc, shared, i % 2, row, column);
      if (has_next) simt_store<Traits>(shared, (i + 1) % 2, block);
    }
    simt_write<Traits>(args, shared, acc, first_m, row, column);
    __syncthreads();  // the next tile overwrites `columns` and the buffers
  }
}

}  // namespace ikbo::lce_impl
