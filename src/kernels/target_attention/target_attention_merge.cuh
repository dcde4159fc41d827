// SPDX-License-Identifier: Apache-2.0
// Puts together the results of the ranges of keys that a user's history was split into.
#pragma once

#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_softmax.cuh"
#include "kernels/target_attention/target_attention_sm90_traits.cuh"

namespace ikbo::target_attention_impl {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeRows = kMergeThreads / 32;  // of a CTA, one a warp
static_assert(kMaxSplits <= 64);                       // two for each lane of a warp

__device__ __forceinline__ float max_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), over the ranges i in order.
// A CTA merges kMergeRows rows of a tile and kv head: grid (tiles * kv heads, tile's rows).
template <typename Traits>
__global__ void __launch_bounds__(kMergeThreads)
    target_attention_merge_kernel(const __grid_constant__ Sm90Args args) {
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim;
  device::grid_dependency_wait();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile_number = args.divide_by_kv_heads(static_cast<int>(blockIdx.x));
  const int kv_head = static_cast<int>(blockIdx.x) - tile_number * args.num_kv_heads;
  const int row_of_tile = static_cast<int>(blockIdx.y) * kMergeRows + warp;
  if (tile_number >= *args.num_tiles) return;
  const int first = tile_number * args.num_splits;
  const Tile tile = args.tiles[first];
  if (row_of_tile >= tile.num_rows) return;
  const auto partial_row = [&](int split) {
    return std::int64_t{(first + split) * args.num_kv_heads + kv_head} * Traits::kTileRows +
           row_of_tile;
  };
  constexpr float kMinusInfinity = -__builtin_huge_valf();
  float lse_of_lane[2];
  for (int half = 0; half < 2; ++half) {
    const int split = lane + 32 * half;
    lse_of_lane[half] =
        split < args.num_splits ? args.partial_lse[partial_row(split)] : kMinusInfinity;
  }
  const float top = max_of_warp(fmaxf(lse_of_lane[0], lse_of_lane[1]));
  const bool has_keys = top != kMinusInfinity;
  float weight_of_lane[2];
  for (int half = 0; half < 2; ++half) {
    weight_of_lane[half] = has_keys ? __expf(lse_of_lane[half] - top) : 0.0f;
  }
  const float sum = sum_of_warp(weight_of_lane[0] + weight_of_lane[1]);
  constexpr int kPairs = (kHeadDim / 2 + 31) / 32;  // of columns, of a lane
  constexpr int kRangesAtOnce = 16 / kPairs;        // whose results are on their way
  float2 total[kPairs] = {};
  for (int first_split = 0; first_split < args.num_splits; first_split += kRangesAtOnce) {
    float weight[kRangesAtOnce];
    float2 pair[kRangesAtOnce][kPairs];
#pragma unroll
    for (int s = 0; s < kRangesAtOnce; ++s) {
      const int split = first_split + s;
      weight[s] = __shfl_sync(~0u, split < 32 ? weight_of_lane[0] : weight_of_lane[1], split % 32);
      const auto* g_row =
          reinterpret_cast<const float2*>(args.partial_out + partial_row(split) * kHeadDim);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        // Of a range without keys nothing is stored.
        const bool counts = weight[s] != 0 && lane + 32 * i < kHeadDim / 2;
        pair[s][i] = counts ? g_row[lane + 32 * i] : float2{};
      }
    }
#pragma unroll
    for (int s = 0; s < kRangesAtOnce; ++s) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        total[i].x += weight[s] * pair[s][i].x;
        total[i].y += weight[s] * pair[s][i].y;
      }
    }
  }
  const Row at = row_at(args, args.grouped_cands, tile, kv_head, tile.first_row + row_of_tile);
  const std::int64_t first_row_of_cand = std::int64_t{at.cand} * args.num_queries * args.num_heads;
  auto* g_out = reinterpret_cast<std::uint32_t*>(
      static_cast<Element*>(args.out) +
      (first_row_of_cand + at.query * args.num_heads + at.head) * args.head_dim);
  const float inverse = has_keys ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (lane + 32 * i >= args.head_dim / 2) continue;
    g_out[lane + 32 * i] = round_pair<Element>(total[i].x * inverse, total[i].y * inverse);
  }
  if (lane == 0) {
    args.lse[first_row_of_cand + at.head * args.num_queries + at.query] =
        has_keys ? top + __logf(sum) : kMinusInfinity;
  }
}

}  // namespace ikbo::target_attention_impl
