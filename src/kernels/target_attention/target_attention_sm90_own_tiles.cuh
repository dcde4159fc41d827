// SPDX-License-Identifier: Apache-2.0
// Lists the tiles of the histories' own rows beside those of candidates, which a CTA has grouped in
// its shared memory.
#pragma once

#include "kernels/device/block_sums.cuh"
#include "kernels/target_attention/target_attention_sm90_traits.cuh"

namespace ikbo::target_attention_impl {

// Replaces each of `count` values by the sum of `first` and those before it; returns the sum of
// all. By one warp, a lane with some neighbours each.
__device__ __forceinline__ int sum_up_before(int* values, int count, int first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int values_of_lane = (count + 31) / 32;
  const int begin = min(lane * values_of_lane, count);
  const int end = min(begin + values_of_lane, count);
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += values[i];
  const int sum_of_lanes = device::inclusive_sum_of_warp(sum);
  int before = first + sum_of_lanes - sum;
  for (int i = begin; i < end; ++i) {
    const int value = values[i];
    values[i] = before;
    before += value;
  }
  return first + __shfl_sync(~0u, sum_of_lanes, 31);
}

// How many users, which are ordered by falling length, have a tile of this number.
__device__ __forceinline__ int users_with_tile(const SelfGroupsOfCta& lists,
                                               const HistoryRows& rows, int num_users, int tile) {
  int with = 0;
  for (int without = num_users; with < without;) {
    const int middle = (with + without) / 2;
    if (rows.tiles_of(lists.lengths[lists.users[middle]]) > tile) {
      with = middle + 1;
    } else {
      without = middle;
    }
  }
  return with;
}

// Fills `first_own_tiles` and counts the tiles in. By all threads of a CTA, with barriers before
// and after; lengths, the order of users and the tiles of candidates are there.
template <int kNumThreads>
__device__ __forceinline__ void place_own_tiles(SelfGroupsOfCta& lists, const HistoryRows& rows,
                                                int num_levels, int num_users) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = rows.is_causal ? num_levels : num_users;
  for (int i = thread; i < count; i += kNumThreads) {
    lists.first_own_tiles[i] = rows.is_causal
                                   ? users_with_tile(lists, rows, num_users, num_levels - 1 - i)
                                   : rows.tiles_of(lists.lengths[lists.users[i]]);
  }
  __syncthreads();
  if (thread < 32) {
    const int before = rows.is_causal ? lists.num_tiles : 0;
    const int sum = sum_up_before(lists.first_own_tiles, count, before);
    __syncwarp();
    if (thread == 0) lists.num_tiles += sum - before;
  }
  __syncthreads();
  if (rows.is_causal) return;
  for (int i = thread; i < count; i += kNumThreads) {
    lists.first_tiles[i] += lists.first_own_tiles[i];
  }
  __syncthreads();
}

}  // namespace ikbo::target_attention_impl
