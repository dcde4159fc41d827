// SPDX-License-Identifier: Apache-2.0
// Launches the generic LCE kernels: user stage into the workspace, then candidate stage.
#include <algorithm>
#include <cstdint>

#include "kernels/host/launch.h"
#include "kernels/lce/lce_generic.h"
#include "kernels/lce/lce_mma.cuh"
#include "kernels/lce/lce_simt.cuh"

namespace ikbo::lce_impl {
namespace {

constexpr const char* kUserStage = "ikbo::lce (user stage)";
constexpr const char* kCandidateStage = "ikbo::lce (candidate stage)";

StageArgs user_stage(const LceParams& p) {
  return {.e = p.e_user,
          .w = p.w_user,
          .bias = p.bias,
          .add = nullptr,
          .cand_to_user = nullptr,
          .out = p.workspace,
          .stride_e_batch = p.stride_e_user_u,
          .stride_e_k = p.stride_e_user_k,
          .stride_e_n = p.stride_e_user_n,
          .stride_w_m = p.stride_w_user_m,
          .stride_w_k = p.stride_w_user_k,
          .num_columns = std::int64_t{p.num_users} * p.n,
          .m = p.m,
          .n = p.n,
          .k = p.k_user};
}

StageArgs candidate_stage(const LceParams& p) {
  return {.e = p.e_cand,
          .w = p.w_cand,
          .bias = nullptr,
          .add = static_cast<const float*>(p.workspace),
          .cand_to_user = p.cand_to_user,
          .out = p.out,
          .stride_e_batch = p.stride_e_cand_b,
          .stride_e_k = p.stride_e_cand_k,
          .stride_e_n = p.stride_e_cand_n,
          .stride_w_m = p.stride_w_cand_m,
          .stride_w_k = p.stride_w_cand_k,
          .num_columns = std::int64_t{p.num_candidates} * p.n,
          .m = p.m,
          .n = p.n,
          .k = p.k_cand};
}

// A CTA per tile; a kernel's loop takes what is past the largest grid.
dim3 grid_of(const StageArgs& args, int tile) {
  const auto tiles = [tile](std::int64_t extent) { return (extent + tile - 1) / tile; };
  constexpr std::int64_t kMaxGrid = 1 << 30;
  return dim3(static_cast<unsigned>(std::min(tiles(args.m) * tiles(args.num_columns), kMaxGrid)));
}

template <int kTile>
void launch_simt(const char* what, const StageArgs& args, cudaStream_t stream) {
  host::launch(what, lce_simt_kernel<SimtTraits<kTile>>,
               {.grid = grid_of(args, kTile), .threads = kSimtThreads}, stream, args);
}

void launch_simt(const char* what, const StageArgs& args, int tile, cudaStream_t stream) {
  if (tile == kLargeTile) {
    launch_simt<kLargeTile>(what, args, stream);
  } else {
    launch_simt<kSmallTile>(what, args, stream);
  }
}

template <typename Traits>
void launch_mma(const char* what, const StageArgs& args, cudaStream_t stream) {
  host::launch(what, lce_mma_kernel<Traits>,
               {.grid = grid_of(args, Traits::kTile),
                .threads = Traits::kThreads,
                .shared_bytes = static_cast<int>(sizeof(typename Traits::Shared))},
               stream, args);
}

template <typename Element>
void launch_mma(const char* what, StageArgs args, int tile, cudaStream_t stream) {
  const std::size_t out_size = args.add == nullptr ? sizeof(float) : sizeof(Element);
  args.e_width = copy_width(args.e, args.stride_e_n, args.n, args.stride_e_batch, args.stride_e_k);
  args.w_width = copy_width(args.w, args.stride_w_k, args.k, args.stride_w_m, 0);
  args.e_k_inner = args.e_width == 1 && args.stride_e_k < args.stride_e_n;
  args.w_m_inner = args.w_width == 1 && args.stride_w_m < args.stride_w_k;
  args.out_pairs =
      args.n % 2 == 0 && reinterpret_cast<std::uintptr_t>(args.out) % (2 * out_size) == 0;
  if (args.e_width == 1 || args.w_width == 1) {
    launch_mma<MmaTraits<Element, kSmallTile, true>>(what, args, stream);
  } else if (tile == kLargeTile) {
    launch_mma<MmaTraits<Element, kLargeTile, false>>(what, args, stream);
  } else {
    launch_mma<MmaTraits<Element, kSmallTile, false>>(what, args, stream);
  }
}

template <typename Element>
void run_mma(const LceParams& params, const LceConfig& config, cudaStream_t stream) {
  if (params.num_users > 0) {
    launch_mma<Element>(kUserStage, user_stage(params), config.user_tile_m, stream);
  }
  launch_mma<Element>(kCandidateStage, candidate_stage(params), config.tile_m, stream);
}

void run_simt(const LceParams& params, const LceConfig& config, cudaStream_t stream) {
  if (params.num_users > 0) {
    launch_simt(kUserStage, user_stage(params), config.user_tile_m, stream);
  }
  launch_simt(kCandidateStage, candidate_stage(params), config.tile_m, stream);
}

}  // namespace

void run_generic(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
                 Stream stream) {
  IKBO_CHECK(limits.compute_capability >= 80,
             "ikbo::lce: the device must have compute capability 8.0 or newer; it has ",
             limits.compute_capability / 10, ".", limits.compute_capability % 10);
  const bool is_mma = config.kernel == LceKernel::kMma;
  if (is_mma && params.dtype == DType::kFloat16) return run_mma<__half>(params, config, stream);
  if (is_mma && params.dtype == DType::kBFloat16) {
    return run_mma<__nv_bfloat16>(params, config, stream);
  }
  IKBO_CHECK(!is_mma && params.dtype == DType::kFloat32, "ikbo::lce: ", to_string(config),
             " takes ", is_mma ? "float16 and bfloat16" : "float32", "; got ",
             name_of(params.dtype));
  run_simt(params, config, stream);
}

}  // namespace ikbo::lce_impl
