// SPDX-License-Identifier: Apache-2.0
// Lists the tiles of self_target_attention where the CTAs of the kernel do not do that themselves.
#pragma once

#include "kernels/target_attention/target_attention_key_grouping.cuh"

namespace ikbo::target_attention_impl {

struct SelfGroupArgs {
  GroupArgs list;
  HistoryRows own;
};

// Tiles of both kinds by falling count of keys, those of the histories' own rows each by its own.
struct SelfGrouping : KeyGrouping {
  const HistoryRows& own;

  __device__ __forceinline__ SelfGrouping(const SelfGroupArgs& all, int* keys)
      : KeyGrouping{all.list, keys}, own(all.own) {}

  __device__ __forceinline__ void order(const device::UserArrays& users) const {
    __shared__ int s_tiles[kBuckets];
    __shared__ int s_warps[device::kGroupThreads / 32];
    const device::CandidateGroups& groups = args.groups;
    const int thread = static_cast<int>(threadIdx.x);
    s_tiles[thread] = 0;
    __syncthreads();
    for (int u = thread; u < groups.num_users; u += device::kGroupThreads) {
      atomicAdd(&s_tiles[bucket_of(u)], groups.tiles_of(users.counts[u]));
    }
    visit_own([&](const Tile& tile) { atomicAdd(&s_tiles[bucket_of_keys(tile.num_keys)], 1); });
    __syncthreads();
    const auto sums = device::sums_of_block<device::kGroupThreads>(s_tiles[thread], s_warps);
    if (thread == 0) *groups.num_tiles = sums.total;
    s_tiles[thread] = sums.before;
    __syncthreads();
    for (int u = thread; u < groups.num_users; u += device::kGroupThreads) {
      users.first_tiles[u] = atomicAdd(&s_tiles[bucket_of(u)], groups.tiles_of(users.counts[u]));
    }
    visit_own([&](const Tile& tile) {
      args.tiles[atomicAdd(&s_tiles[bucket_of_keys(tile.num_keys)], 1)] = tile;
    });
    __syncthreads();
  }

 private:
  // Calls `visit(tile)` for all tiles of the histories' own rows, a warp for each user.
  template <typename Visit>
  __device__ __forceinline__ void visit_own(Visit&& visit) const {
    const int thread = static_cast<int>(threadIdx.x);
    for (int u = thread / 32; u < args.groups.num_users; u += device::kGroupThreads / 32) {
      const int length = args.histories.length_of(u);
      const int tiles = own.tiles_of(length);
#pragma unroll 1
      for (int t = thread % 32; t < tiles; t += 32) {
        visit(own.tile_of(args.histories, u, length, t));
      }
    }
  }
};

__global__ void __launch_bounds__(device::kGroupThreads)
    self_target_attention_group_kernel(SelfGroupArgs args) {
  extern __shared__ int s_users[];
  device::grid_dependency_launch();
  const GroupArgs& list = args.list;
  int* num_keys = list.groups.num_users <= device::kMaxUsersInShared
                      ? s_users + device::kGroupArrays * list.groups.num_users
                      : list.num_keys_of_users;
  const auto place = [&](int t, const device::UserRows& rows) {
    list.tiles[t] = list.histories.tile_of(rows, num_keys[rows.user], 0);
  };
  device::group_candidates(list.groups, s_users, place, SelfGrouping(args, num_keys));
}

}  // namespace ikbo::target_attention_impl
