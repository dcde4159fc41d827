// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user and cuts each user's rows into tiles. One CTA: a few microseconds
// beside a kernel that every tile waits for anyway.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups_layout.h"

namespace ikbo::device {

struct CandidateGroups {
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;
  int rows_of_candidate;
  int tile_rows;
  std::int32_t* num_tiles;
  std::int32_t* users;          // [kGroupArrays, U] of scratch
  std::int32_t* grouped_cands;  // [B]: candidates, user by user
};

// Rows of one user; row r is row r % rows_of_candidate of its candidate r / rows_of_candidate.
struct UserRows {
  int user;
  int first_cand;  // position of the user's first candidate in the grouped list
  int first_row;
  int num_rows;  // at most tile_rows
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

// By a CTA of kGroupThreads threads. Calls `place(t, rows)` for every tile t, with the UserRows in
// it; tiles of one user follow each other.
template <typename Place>
__device__ __forceinline__ void group_candidates(const CandidateGroups& groups, int* s_users,
                                                 Place&& place) {
  __shared__ int s_warps[kGroupThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  int* counts = groups.num_users <= kMaxUsersInShared ? s_users : groups.users;
  int* first_cands = counts + groups.num_users;
  int* first_tiles = first_cands + groups.num_users;
  for (int u = thread; u < groups.num_users; u += kGroupThreads) counts[u] = 0;
  __syncthreads();
  for (int b = thread; b < groups.num_candidates; b += kGroupThreads) {
    atomicAdd(&counts[groups.cand_to_user[b]], 1);
  }
  __syncthreads();
  int cands_before = 0;  // of users of earlier rounds
  int tiles_before = 0;
  for (int first = 0; first < groups.num_users; first += kGroupThreads) {
    const int user = first + thread;
    const int count = user < groups.num_users ? counts[user] : 0;
    const std::int64_t rows = std::int64_t{count} * groups.rows_of_candidate;
    const BlockSums cands = sums_of_block(count, s_warps);
    const BlockSums tiles =
        sums_of_block(static_cast<int>((rows + groups.tile_rows - 1) / groups.tile_rows), s_warps);
    if (user < groups.num_users) {
      first_cands[user] = cands_before + cands.before;
      first_tiles[user] = tiles_before + tiles.before;
    }
    cands_before += cands.total;
    tiles_before += tiles.total;
  }
  __syncthreads();
  if (thread == 0) *groups.num_tiles = tiles_before;
  for (int t = thread; t < tiles_before; t += kGroupThreads) {
    const int user = last_not_above(first_tiles, groups.num_users, t);
    const int first_row = (t - first_tiles[user]) * groups.tile_rows;
    const int rows_left = counts[user] * groups.rows_of_candidate - first_row;
    place(t, UserRows{.user = user,
                      .first_cand = first_cands[user],
                      .first_row = first_row,
                      .num_rows = min(rows_left, groups.tile_rows)});
  }
  __syncthreads();
  // In no particular order within a user: no row's result depends on its place in a tile.
  for (int b = thread; b < groups.num_candidates; b += kGroupThreads) {
    groups.grouped_cands[atomicAdd(&first_cands[groups.cand_to_user[b]], 1)] = b;
  }
}

}  // namespace ikbo::device
