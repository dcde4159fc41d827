// SPDX-License-Identifier: Apache-2.0
// Puts together the results of the ranges of keys that a user's history was split into, for any
// head width and type.
#pragma once

#include "kernels/target_attention/target_attention_generic.cuh"
#include "kernels/target_attention/target_attention_merge.cuh"

namespace ikbo::target_attention_impl {

// out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), over the ranges i in order. A
// CTA merges kMergeRows rows of a tile and kv head: grid (tiles * kv heads, tile's rows).
// `pitch`: columns of a partial result, a multiple of 32 up to 256.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads)
    target_attention_generic_merge_kernel(const __grid_constant__ GenericArgs args, int pitch) {
  constexpr float kMinusInfinity = -__builtin_huge_valf();
  constexpr int kLaneColumns = 256 / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile_number = static_cast<int>(blockIdx.x) / args.num_kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % args.num_kv_heads;
  const int row = static_cast<int>(blockIdx.y) * kMergeRows + static_cast<int>(threadIdx.x) / 32;
  if (tile_number >= *args.num_tiles) return;
  const int first = tile_number * args.num_splits;
  const Tile tile = args.tiles[first];
  if (row >= tile.num_rows) return;
  // Two ranges a lane.
  float lse_of_lane[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int split = lane + 32 * half;
    lse_of_lane[half] = split < args.num_splits
                            ? args.partial_lse[partial_row(args, first + split, kv_head, row)]
                            : kMinusInfinity;
  }
  const float top = max_of_warp(fmaxf(lse_of_lane[0], lse_of_lane[1]));
  const float reference = top == kMinusInfinity ? 0.0f : top;  // no range has a key
  const float weight_of_lane[2] = {expf(lse_of_lane[0] - reference),
                                   expf(lse_of_lane[1] - reference)};
  const float sum = sum_of_warp(weight_of_lane[0] + weight_of_lane[1]);
  float total[kLaneColumns] = {};
  for (int split = 0; split < args.num_splits; ++split) {
    const float weight =
        __shfl_sync(~0u, split < 32 ? weight_of_lane[0] : weight_of_lane[1], split % 32);
    if (weight == 0) continue;  // of a range without keys nothing is stored
    const float* g_row =
        args.partial_out + partial_row(args, first + split, kv_head, row) * pitch + lane;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      if (32 * i < pitch) total[i] = fmaf(weight, g_row[32 * i], total[i]);
    }
  }
  const GenericRow place = locate_row(args, tile, kv_head, row);
  Element* g_out = static_cast<Element*>(args.out) + place.out_at(args) + lane;
  const float inverse = sum != 0 ? 1 / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (lane + 32 * i < args.head_dim) g_out[32 * i] = static_cast<Element>(total[i] * inverse);
  }
  if (lane == 0) args.lse[place.lse_at(args)] = sum != 0 ? top + logf(sum) : kMinusInfinity;
}

}  // namespace ikbo::target_attention_impl
