// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user and lists the tiles. One CTA: a few microseconds beside a kernel
// that every tile waits for anyway.
#pragma once

#include <cstdint>

#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

inline constexpr int kGroupThreads = 1024;
inline constexpr int kMaxUsersInShared = 16384;

struct GroupArgs {
  const std::int32_t* cand_to_user;
  const std::int32_t* user_lengths;  // may be nullptr
  int num_users;
  int num_candidates;
  int num_keys;
  int rows_of_candidate;
  std::int32_t* num_tiles;
  std::int32_t* users;  // [kGroupArrays, U] of scratch
  std::int32_t* grouped_cands;
  Tile* tiles;
};

// Sums of all threads' values before this thread's, and of all.
struct BlockSums {
  int before;
  int total;
};
__device__ inline BlockSums sums_of_block(int value, int (&s_warps)[kGroupThreads / 32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) s_warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int of_warps = s_warps[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, of_warps, step);
      if (lane >= step) of_warps += other;
    }
    s_warps[lane] = of_warps;
  }
  __syncthreads();
  const BlockSums sums{sum - value + (warp > 0 ? s_warps[warp - 1] : 0),
                       s_warps[kGroupThreads / 32 - 1]};
  __syncthreads();
  return sums;
}

// The last of `count` ascending values that is not above `wanted`; the first is 0.
__device__ inline int last_not_above(const int* values, int count, int wanted) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (values[middle] <= wanted ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kGroupThreads) target_attention_group_kernel(GroupArgs args) {
  extern __shared__ int s_users[];  // the scratch, where it fits
  __shared__ int s_warps[kGroupThreads / 32];
  device::grid_dependency_launch();
  const int thread = static_cast<int>(threadIdx.x);
  int* counts = args.num_users <= kMaxUsersInShared ? s_users : args.users;
  int* first_cands = counts + args.num_users;
  int* first_tiles = first_cands + args.num_users;
  for (int u = thread; u < args.num_users; u += kGroupThreads) counts[u] = 0;
  __syncthreads();
  for (int b = thread; b < args.num_candidates; b += kGroupThreads) {
    atomicAdd(&counts[args.cand_to_user[b]], 1);
  }
  __syncthreads();
  int cands_before = 0;  // of users of earlier rounds
  int tiles_before = 0;
  for (int first = 0; first < args.num_users; first += kGroupThreads) {
    const int user = first + thread;
    const int count = user < args.num_users ? counts[user] : 0;
    const std::int64_t rows = std::int64_t{count} * args.rows_of_candidate;
    const BlockSums cands = sums_of_block(count, s_warps);
    const BlockSums tiles =
        sums_of_block(static_cast<int>((rows + kTileRows - 1) / kTileRows), s_warps);
    if (user < args.num_users) {
      first_cands[user] = cands_before + cands.before;
      first_tiles[user] = tiles_before + tiles.before;
    }
    cands_before += cands.total;
    tiles_before += tiles.total;
  }
  __syncthreads();
  if (thread == 0) *args.num_tiles = tiles_before;
  for (int t = thread; t < tiles_before; t += kGroupThreads) {
    const int user = last_not_above(first_tiles, args.num_users, t);
    const int first_row = (t - first_tiles[user]) * kTileRows;
    args.tiles[t] = {
        .user = user,
        .first_cand = first_cands[user],
        .first_row = first_row,
        .num_rows = min(counts[user] * args.rows_of_candidate - first_row, kTileRows),
        .num_keys = args.user_lengths != nullptr ? args.user_lengths[user] : args.num_keys,
        .unused = {}};
  }
  __syncthreads();
  // In no particular order within a user: no row's result depends on its place in a tile.
  for (int b = thread; b < args.num_candidates; b += kGroupThreads) {
    args.grouped_cands[atomicAdd(&first_cands[args.cand_to_user[b]], 1)] = b;
  }
}

}  // namespace ikbo::target_attention_impl
