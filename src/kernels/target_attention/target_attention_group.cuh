// SPDX-License-Identifier: Apache-2.0
// Lists the tiles of target attention.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

struct GroupArgs {
  device::CandidateGroups groups;
  const std::int32_t* user_lengths;  // may be nullptr, as the next two
  const std::int32_t* user_offsets;
  const std::int32_t* cand_lengths;
  int num_keys;
  int key_block;
  int num_splits;
  std::int32_t* num_keys_of_users;  // [U], of scratch
  Tile* tiles;
};

// Finds how many keys of each user count for any of its candidates. Tiles with more of them come
// first, so that those that a CTA works on last are short.
struct KeyGrouping {
  const GroupArgs& args;
  int* num_keys;  // [U]

  __device__ __forceinline__ void begin(int user) const {
    num_keys[user] = args.cand_lengths != nullptr ? 0 : args.num_keys;
  }
  __device__ __forceinline__ void count(int user, int cand) const {
    if (args.cand_lengths != nullptr) atomicMax(&num_keys[user], args.cand_lengths[cand]);
  }
  __device__ __forceinline__ void finish(int user) const {
    int length = args.num_keys;
    if (args.user_lengths != nullptr) length = args.user_lengths[user];
    if (args.user_offsets != nullptr) {
      length = args.user_offsets[user + 1] - args.user_offsets[user];
    }
    num_keys[user] = min(num_keys[user], length);
  }

  // A bucket is a range of counts of keys, 3 % wide: the exponent and five bits of the fraction.
  static constexpr int kBuckets = device::kGroupThreads;
  __device__ __forceinline__ int bucket_of(int user) const {
    const int bits = __float_as_int(static_cast<float>(num_keys[user]) + 1.0f);
    return kBuckets - 1 - ((bits >> 18) - (127 << 5));
  }
  __device__ __forceinline__ void order(const device::UserArrays& users) const {
    if (args.user_lengths == nullptr && args.user_offsets == nullptr &&
        args.cand_lengths == nullptr) {
      return;
    }
    __shared__ int s_tiles[kBuckets];
    __shared__ int s_warps[device::kGroupThreads / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const int num_users = args.groups.num_users;
    s_tiles[thread] = 0;
    __syncthreads();
    for (int u = thread; u < num_users; u += device::kGroupThreads) {
      atomicAdd(&s_tiles[bucket_of(u)], device::tiles_of(args.groups, users.counts[u]));
    }
    __syncthreads();
    const int before = device::sums_of_block(s_tiles[thread], s_warps).before;
    s_tiles[thread] = before;
    __syncthreads();
    for (int u = thread; u < num_users; u += device::kGroupThreads) {
      users.first_tiles[u] =
          atomicAdd(&s_tiles[bucket_of(u)], device::tiles_of(args.groups, users.counts[u]));
    }
    __syncthreads();
  }
};

__global__ void __launch_bounds__(device::kGroupThreads)
    target_attention_group_kernel(GroupArgs args) {
  extern __shared__ int s_users[];
  device::grid_dependency_launch();
  int* num_keys = args.groups.num_users <= device::kMaxUsersInShared
                      ? s_users + device::kGroupArrays * args.groups.num_users
                      : args.num_keys_of_users;
  const auto place = [&](int t, const device::UserRows& rows) {
    const int keys = num_keys[rows.user];
    const int blocks = (keys + args.key_block - 1) / args.key_block;
    const int keys_of_range = (blocks + args.num_splits - 1) / args.num_splits * args.key_block;
    const bool is_packed = args.user_offsets != nullptr;
    for (int split = 0; split < args.num_splits; ++split) {
      const int before = min(split * keys_of_range, keys);
      args.tiles[t * args.num_splits + split] = {
          .history = is_packed ? 0 : rows.user,
          .first_key = before + (is_packed ? args.user_offsets[rows.user] : 0),
          .num_keys = min(keys - before, keys_of_range),
          .keys_before = before,
          .first_cand = rows.first_cand,
          .first_row = rows.first_row,
          .num_rows = rows.num_rows,
          .unused = 0};
    }
  };
  device::group_candidates(args.groups, s_users, place, KeyGrouping{args, num_keys});
}

}  // namespace ikbo::target_attention_impl
