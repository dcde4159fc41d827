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
  const std::int32_t* user_lengths;  // may be nullptr
  int num_keys;
  Tile* tiles;
};

__global__ void __launch_bounds__(device::kGroupThreads)
    target_attention_group_kernel(GroupArgs args) {
  extern __shared__ int s_users[];
  device::grid_dependency_launch();
  device::group_candidates(args.groups, s_users, [&](int t, const device::UserRows& rows) {
    args.tiles[t] = {
        .user = rows.user,
        .first_cand = rows.first_cand,
        .first_row = rows.first_row,
        .num_rows = rows.num_rows,
        .num_keys = args.user_lengths != nullptr ? args.user_lengths[rows.user] : args.num_keys,
        .unused = {}};
  });
}

}  // namespace ikbo::target_attention_impl
