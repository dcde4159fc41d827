// SPDX-License-Identifier: Apache-2.0
// Where the tiles of users whose candidates a CTA has grouped (cta_groups.cuh) lie in their list.
#pragma once

#include <cstdint>

#include "kernels/device/block_sums.cuh"

namespace ikbo::device {

// Of U users, with `count_of(u)` candidates each. Sums of the counts go to `first_cands`, U + 1 of
// them; those of tiles, over the users in the order `user_at(i)`, to `first_tiles` and `num_tiles`.
// By one warp, a lane with some neighbours each.
template <typename CountOf, typename UserAt, typename TilesOf>
__device__ __forceinline__ void place_tiles(int num_users, CountOf&& count_of, UserAt&& user_at,
                                            TilesOf&& tiles_of, std::uint16_t* first_cands,
                                            int* first_tiles, int& num_tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int users_of_lane = (num_users + 31) / 32;
  const int begin = min(lane * users_of_lane, num_users);
  const int end = min(begin + users_of_lane, num_users);
  int tiles = 0;
  int cands = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    cands += count_of(i);
    tiles += tiles_of(count_of(user_at(i)));
  }
  const int tiles_of_lanes = inclusive_sum_of_warp(tiles);
  const int cands_of_lanes = inclusive_sum_of_warp(cands);
  int first_tile = tiles_of_lanes - tiles;
  int first_cand = cands_of_lanes - cands;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    first_tiles[i] = first_tile;
    first_cands[i] = static_cast<std::uint16_t>(first_cand);
    first_tile += tiles_of(count_of(user_at(i)));
    first_cand += count_of(i);
  }
  if (lane == 31) {
    num_tiles = tiles_of_lanes;
    first_cands[num_users] = static_cast<std::uint16_t>(cands_of_lanes);
  }
}

// The last of `count` ascending values that is not above `value`, which the first one is not.
__device__ __forceinline__ int last_not_above(const int* values, int count, int value) {
  int at = 0;
#pragma unroll 1
  for (int end = count; end - at > 1;) {
    const int middle = (at + end) / 2;
    (values[middle] <= value ? at : end) = middle;
  }
  return at;
}

}  // namespace ikbo::device
