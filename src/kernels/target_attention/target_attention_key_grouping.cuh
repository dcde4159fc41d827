// SPDX-License-Identifier: Apache-2.0
// What the kernels that list tiles (target_attention_group.cuh, self_target_attention_group.cuh)
// need beside the candidates of each user: the keys that count for them.
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
  __device__ __forceinline__ static int bucket_of_keys(int keys) {
    const int bits = __float_as_int(static_cast<float>(keys) + 1.0f);
    return kBuckets - 1 - ((bits >> 18) - (127 << 5));
  }
  __device__ __forceinline__ int bucket_of(int user) const {
    return bucket_of_keys(num_keys[user]);
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

}  // namespace ikbo::target_attention_impl
