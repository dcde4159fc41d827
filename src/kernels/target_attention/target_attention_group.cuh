// SPDX-License-Identifier: Apache-2.0
// Lists the tiles of target attention, where there are too many candidates or users for every CTA
// of the kernel to do that for itself (target_attention_sm90_groups.cuh).
#pragma once

#include "kernels/target_attention/target_attention_key_grouping.cuh"

namespace ikbo::target_attention_impl {

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
