// SPDX-License-Identifier: Apache-2.0
// The candidates of a large batch, user by user, for bmm_sm90.
#include <cstdint>

#include "kernels/bmm/bmm_sm90_launch.h"
#include "kernels/device/candidate_groups.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/host/launch.h"

namespace ikbo::bmm_impl {
namespace {

struct ListArgs {
  device::CandidateGroups groups;
  std::int32_t* is_sorted;
};

// Whether the candidates are sorted by user; gives up early where they are not.
__device__ __forceinline__ bool are_sorted(const std::int32_t* cand_to_user, int num_candidates) {
  constexpr int kAtOnce = 8;
  bool is_sorted = true;
#pragma unroll 1
  for (int first = 0; is_sorted && first < num_candidates - 1;
       first += kAtOnce * device::kGroupThreads) {
    int users[kAtOnce];
    int next[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int b = first + i * device::kGroupThreads + static_cast<int>(threadIdx.x);
      const int at = min(b, num_candidates - 2);
      users[i] = cand_to_user[at];
      next[i] = cand_to_user[at + 1];
    }
    bool are_in_order = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) are_in_order = are_in_order && users[i] <= next[i];
    is_sorted = __syncthreads_and(are_in_order ? 1 : 0) != 0;
  }
  return is_sorted;
}

__global__ void __launch_bounds__(device::kGroupThreads) bmm_list_kernel(ListArgs args) {
  extern __shared__ int s_users[];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  device::grid_dependency_launch();
#endif
  const bool is_sorted = are_sorted(args.groups.cand_to_user, args.groups.num_candidates);
  if (threadIdx.x == 0) *args.is_sorted = is_sorted ? 1 : 0;
  if (is_sorted) return;
  device::group_candidates(args.groups, s_users, [](int, const device::UserRows&) {});
}

}  // namespace

void launch_list(const BmmParams& p, unsigned char* workspace, cudaStream_t stream) {
  const WorkspaceLayout layout = make_workspace_layout(p);
  const auto ints = [&](std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(workspace + offset);
  };
  host::launch("ikbo::bmm (list)", bmm_list_kernel,
               {.grid = dim3(1),
                .threads = device::kGroupThreads,
                .shared_bytes = device::group_shared_bytes(p.num_users)},
               stream,
               ListArgs{.groups = {.cand_to_user = p.cand_to_user,
                                   .num_users = p.num_users,
                                   .num_candidates = p.num_candidates,
                                   .rows_of_candidate = p.n,
                                   .tile_rows = kTileColumns,
                                   .num_tiles = ints(layout.num_tiles),
                                   .users = ints(layout.users),
                                   .grouped_cands = ints(layout.grouped_cands)},
                        .is_sorted = ints(layout.is_sorted)});
}

}  // namespace ikbo::bmm_impl
