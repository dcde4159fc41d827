// SPDX-License-Identifier: Apache-2.0
// Lists the tiles of target attention, where there are too many candidates or users for every CTA
// of the kernel to do that for itself (target_attention_sm90_groups.cuh).
#pragma once

#include <cstdint>

#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_tiles.cuh"

namespace ikbo::target_attention_impl {

struct GroupArgs {
  device::CandidateGroups groups;
  Histories histories;
  std::int32_t* num_keys_of_users;  // [U], of scratch
  Tile* tiles;
};

// Finds how many keys of each user count for any of its candidates. Tiles with more of them come
// first, so that those that a CTA works on last are short.
struct KeyGrouping {
  const GroupArgs& args;
  int* num_keys;  // [U]

  __device__ __forceinline__ void begin(int user) const {
    num_keys[user] = args.histories.cand_lengths != nullptr ? 0 : args.histories.num_keys;
  }
  __device__ __forceinline__ void count(int user, int cand) const {
    const std::int32_t* lengths = args.histories.cand_lengths;
    if (lengths != nullptr) atomicMax(&num_keys[user], lengths[cand]);
  }
  __device__ __forceinline__ void finish(int user) const {
    num_keys[user] = min(num_keys[user], args.histories.length_of(user));
  }

  // A bucket is a range of counts of keys, 3 % wide: the exponent and five bits of the fraction.
  static constexpr int kBuckets = device::kGroupThreads;
  __device__ __forceinline__ int bucket_of(int user) const {
    const int bits = __float_as_int(static_cast<float>(num_keys[user]) + 1.0f);
    return kBuckets - 1 - ((bits >> 18) - (127 << 5));
  }
  __device__ __forceinline__ void order(const device::UserArrays& users) const {
    if (!args.histories.are_uneven()) return;
    __shared__ int s_tiles[kBuckets];
    __shared__ int s_warps[device::kGroupThreads / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const int num_users = args.groups.num_users;
    s_tiles[thread] = 0;
    __syncthreads();
    for (int u = thread; u < num_users; u += device::kGroupThreads) {
      atomicAdd(&s_tiles[bucket_of(u)], args.groups.tiles_of(users.counts[u]));
    }
    __syncthreads();
    const int before =
        device::sums_of_block<device::kGroupThreads>(s_tiles[thread], s_warps).before;
    s_tiles[thread] = before;
    __syncthreads();
    for (int u = thread; u < num_users; u += device::kGroupThreads) {
      users.first_tiles[u] =
          atomicAdd(&s_tiles[bucket_of(u)], args.groups.tiles_of(users.counts[u]));
    }
    __syncthreads();
  }
};

// NOTE: not told that there is one CTA, ptxas gives each half of the registers on some
// architectures, and spills.
__global__ void __launch_bounds__(device::kGroupThreads, 1)
    target_attention_group_kernel(GroupArgs args) {
  extern __shared__ int s_users[];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  device::grid_dependency_launch();
#endif
  int* num_keys = args.groups.num_users <= device::kMaxUsersInShared
                      ? s_users + device::kGroupArrays * args.groups.num_users
                      : args.num_keys_of_users;
  const auto place = [&](int t, const device::UserRows& rows) {
    const int num_splits = args.histories.num_splits;
    for (int split = 0; split < num_splits; ++split) {
      args.tiles[t * num_splits + split] = args.histories.tile_of(rows, num_keys[rows.user], split);
    }
  };
  device::group_candidates(args.groups, s_users, place, KeyGrouping{args, num_keys});
}

}  // namespace ikbo::target_attention_impl
