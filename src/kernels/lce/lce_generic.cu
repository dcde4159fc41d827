// SPDX-License-Identifier: Apache-2.0
// Launches the generic LCE kernels: user stage into the workspace, then candidate stage.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/host/launch.h"
#include "kernels/lce/lce_generic.h"
#include "kernels/lce/lce_simt.cuh"

namespace ikbo::lce_impl {
namespace {

template <typename Element>
void run_simt(const LceParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  auto* partial = static_cast<float*>(p.workspace);
  const SimtArgs user{.e = p.e_user,
                      .w = p.w_user,
                      .bias = p.bias,
                      .add = nullptr,
                      .cand_to_user = nullptr,
                      .out = partial,
                      .stride_e_batch = p.stride_e_user_u,
                      .stride_e_k = p.stride_e_user_k,
                      .stride_e_n = p.stride_e_user_n,
                      .stride_w_m = p.stride_w_user_m,
                      .stride_w_k = p.stride_w_user_k,
                      .m = p.m,
                      .n = p.n,
                      .k = p.k_user,
                      .batch = p.num_users};
  const SimtArgs candidate{.e = p.e_cand,
                           .w = p.w_cand,
                           .bias = nullptr,
                           .add = partial,
                           .cand_to_user = p.cand_to_user,
                           .out = p.out,
                           .stride_e_batch = p.stride_e_cand_b,
                           .stride_e_k = p.stride_e_cand_k,
                           .stride_e_n = p.stride_e_cand_n,
                           .stride_w_m = p.stride_w_cand_m,
                           .stride_w_k = p.stride_w_cand_k,
                           .m = p.m,
                           .n = p.n,
                           .k = p.k_cand,
                           .batch = p.num_candidates};
  const auto grid_of = [&](const SimtArgs& args) {
    const std::int64_t tiles = static_cast<std::int64_t>(args.batch) *
                               ((args.m + kSimtTile - 1) / kSimtTile) *
                               ((args.n + kSimtTile - 1) / kSimtTile);
    return dim3(static_cast<unsigned>(std::min<std::int64_t>(tiles, 8LL * limits.num_sms)));
  };
  host::launch("ikbo::lce (user stage)", lce_simt_kernel<Element, float>,
               {.grid = grid_of(user), .threads = kSimtThreads}, stream, user);
  host::launch("ikbo::lce (candidate stage)", lce_simt_kernel<Element, Element>,
               {.grid = grid_of(candidate), .threads = kSimtThreads}, stream, candidate);
}

}  // namespace

void run_generic(const LceParams& params, const LceConfig&, const DeviceLimits& limits,
                 cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kFloat16:
      return run_simt<__half>(params, limits, stream);
    case DType::kBFloat16:
      return run_simt<__nv_bfloat16>(params, limits, stream);
    case DType::kFloat32:
      return run_simt<float>(params, limits, stream);
    default:
      detail::throw_error(__FILE__, __LINE__,
                          "ikbo::lce: CUDA kernels take float16, bfloat16 or float32; got ",
                          name_of(params.dtype));
  }
}

}  // namespace ikbo::lce_impl
