// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/host/launch.h"
#include "kernels/linear/linear_generic.h"
#include "kernels/linear/linear_simt.cuh"

namespace ikbo::linear_impl {
namespace {

SimtArgs user_stage(const LinearParams& p) {
  return {.x = p.x_user,
          .w = p.w_user,
          .bias = p.bias,
          .user_partial = nullptr,
          .cand_to_user = nullptr,
          .out = p.workspace,
          .stride_x_row = p.stride_x_user_u,
          .stride_x_k = p.stride_x_user_k,
          .stride_w_m = p.stride_w_user_m,
          .stride_w_k = p.stride_w_user_k,
          .m = p.m,
          .k = p.k_user,
          .rows = p.num_users,
          .activation = Activation::kNone};
}

SimtArgs candidate_stage(const LinearParams& p) {
  return {.x = p.x_cand,
          .w = p.w_cand,
          .bias = nullptr,
          .user_partial = static_cast<const float*>(p.workspace),
          .cand_to_user = p.cand_to_user,
          .out = p.out,
          .stride_x_row = p.stride_x_cand_b,
          .stride_x_k = p.stride_x_cand_k,
          .stride_w_m = p.stride_w_cand_m,
          .stride_w_k = p.stride_w_cand_k,
          .m = p.m,
          .k = p.k_cand,
          .rows = p.num_candidates,
          .activation = p.activation};
}

template <typename Element>
void run_typed(const LinearParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const SimtArgs user = user_stage(p);
  const SimtArgs candidate = candidate_stage(p);
  const auto shape_of = [&](const SimtArgs& args) {
    const auto tiles = [](std::int64_t size) { return (size + kSimtTile - 1) / kSimtTile; };
    const auto ctas =
        std::min<std::int64_t>(tiles(args.rows) * tiles(args.m), 16LL * limits.num_sms);
    return host::LaunchShape{.grid = dim3(static_cast<unsigned>(ctas)), .threads = kSimtThreads};
  };
  host::launch("ikbo::linear (user stage)", linear_simt_kernel<Element, float>, shape_of(user),
               stream, user);
  host::launch("ikbo::linear (candidate stage)", linear_simt_kernel<Element, Element>,
               shape_of(candidate), stream, candidate);
}

}  // namespace

void run_generic(const LinearParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::kFloat16:
      return run_typed<__half>(params, limits, stream);
    case DType::kBFloat16:
      return run_typed<__nv_bfloat16>(params, limits, stream);
    case DType::kFloat32:
      return run_typed<float>(params, limits, stream);
    default:
      detail::throw_error(__FILE__, __LINE__,
                          "ikbo::linear: CUDA kernels take float16, bfloat16 or float32; got ",
                          name_of(params.dtype));
  }
}

}  // namespace ikbo::linear_impl
