// SPDX-License-Identifier: Apache-2.0
// Launches the grouping of candidates by user, and the generic kernels of bmm.
#include <algorithm>
#include <cstdint>

#include "kernels/bmm/bmm_generic.cuh"
#include "kernels/bmm/bmm_generic.h"
#include "kernels/device/candidate_groups.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/host/launch.h"

namespace ikbo::bmm_impl {
namespace {

struct GroupArgs {
  device::CandidateGroups groups;
  Tile* tiles;
};

__global__ void __launch_bounds__(device::kGroupThreads) bmm_group_kernel(GroupArgs args) {
  extern __shared__ int s_users[];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  device::grid_dependency_launch();
#endif
  device::group_candidates(args.groups, s_users, [&](int t, const device::UserRows& rows) {
    args.tiles[t] = {.user = rows.user,
                     .first_cand = rows.first_cand,
                     .first_column = rows.first_row,
                     .num_columns = rows.num_rows};
  });
}

const std::int32_t* ints_at(const unsigned char* workspace, std::size_t offset) {
  return reinterpret_cast<const std::int32_t*>(workspace + offset);
}

using Kernel = void (*)(GenericArgs);

// Copies go along R where that is the inner dimension.
template <typename Engine>
Kernel select_kernel(const BmmParams& p) {
  const bool along_r_a = p.stride_a_r < p.stride_a_p;
  const bool along_r_b = p.stride_b_r < p.stride_b_n;
  if (along_r_a) {
    return along_r_b ? bmm_generic_kernel<Engine, true, true>
                     : bmm_generic_kernel<Engine, true, false>;
  }
  return along_r_b ? bmm_generic_kernel<Engine, false, true>
                   : bmm_generic_kernel<Engine, false, false>;
}

template <typename Engine>
void launch_engine(const BmmParams& p, int num_sms, const unsigned char* workspace,
                   cudaStream_t stream) {
  constexpr std::int64_t kCtasPerSm = 8;  // as many as have a place, and then some
  const WorkspaceLayout layout = make_workspace_layout(p);
  const std::int64_t num_tiles_p = (std::int64_t{p.p} + kGenericTile - 1) / kGenericTile;
  const std::int64_t grid = std::min(max_tiles(p) * num_tiles_p, num_sms * kCtasPerSm);
  host::launch("ikbo::bmm", select_kernel<Engine>(p),
               {.grid = dim3(static_cast<unsigned>(grid)), .threads = kGenericThreads}, stream,
               GenericArgs{.num_tiles = ints_at(workspace, layout.num_tiles),
                           .tiles = reinterpret_cast<const Tile*>(workspace + layout.tiles),
                           .grouped_cands = ints_at(workspace, layout.grouped_cands),
                           .a_user = p.a_user,
                           .b_cand = p.b_cand,
                           .out = p.out,
                           .stride_a_u = p.stride_a_u,
                           .stride_a_p = p.stride_a_p,
                           .stride_a_r = p.stride_a_r,
                           .stride_b_b = p.stride_b_b,
                           .stride_b_r = p.stride_b_r,
                           .stride_b_n = p.stride_b_n,
                           .p = p.p,
                           .r = p.r,
                           .n = p.n,
                           .num_tiles_p = static_cast<int>(num_tiles_p),
                           .divide_by_n = device::FastDivide(p.n)});
}

}  // namespace

void launch_group(const BmmParams& p, unsigned char* workspace, cudaStream_t stream) {
  const WorkspaceLayout layout = make_workspace_layout(p);
  const auto ints = [&](std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(workspace + offset);
  };
  host::launch("ikbo::bmm (grouping)", bmm_group_kernel,
               {.grid = dim3(1),
                .threads = device::kGroupThreads,
                .shared_bytes = device::group_shared_bytes(p.num_users)},
               stream,
               GroupArgs{.groups = {.cand_to_user = p.cand_to_user,
                                    .num_users = p.num_users,
                                    .num_candidates = p.num_candidates,
                                    .rows_of_candidate = p.n,
                                    .tile_rows = kTileColumns,
                                    .num_tiles = ints(layout.num_tiles),
                                    .users = ints(layout.users),
                                    .grouped_cands = ints(layout.grouped_cands)},
                         .tiles = reinterpret_cast<Tile*>(workspace + layout.tiles)});
}

void launch_generic(const BmmParams& params, const BmmCudaConfig& config, int num_sms,
                    unsigned char* workspace, cudaStream_t stream) {
  const bool is_mma = config.kernel == BmmKernel::kMma;
  if (is_mma && params.dtype == DType::kFloat16) {
    return launch_engine<MmaEngine<__half>>(params, num_sms, workspace, stream);
  }
  if (is_mma && params.dtype == DType::kBFloat16) {
    return launch_engine<MmaEngine<__nv_bfloat16>>(params, num_sms, workspace, stream);
  }
  IKBO_CHECK(!is_mma && params.dtype == DType::kFloat32, "ikbo::bmm: ", to_string(config),
             " takes ", is_mma ? "float16 and bfloat16" : "float32", "; got ",
             name_of(params.dtype));
  launch_engine<SimtEngine>(params, num_sms, workspace, stream);
}

}  // namespace ikbo::bmm_impl
