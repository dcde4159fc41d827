// SPDX-License-Identifier: Apache-2.0
// ikbo::lce on CUDA: packs what is not packed, then user stage and candidate stage of the chosen
// kernel.
#include <cstdint>

#include "ikbo/lce.h"
#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"
#include "kernels/lce/lce_generic.h"
#include "kernels/lce/lce_layout.h"
#include "kernels/lce/lce_pack.cuh"
#include "kernels/lce/lce_sm90_launch.h"

namespace ikbo {
namespace lce_impl {
namespace {

Sm90Instance find_instance(int tile_m, DType dtype) {
  switch (tile_m) {
    case 64:
      return make_sm90_instance<64>(dtype);
    case 128:
      return make_sm90_instance<128>(dtype);
    case 160:
      return make_sm90_instance<160>(dtype);
    case 192:
      return make_sm90_instance<192>(dtype);
    case 224:
      return make_sm90_instance<224>(dtype);
    case 256:
      return make_sm90_instance<256>(dtype);
    default:
      detail::throw_error(__FILE__, __LINE__, "ikbo::lce: no lce_sm90 kernel with tile_m ", tile_m,
                          "; there are 64, 128, 160, 192, 224, 256");
  }
}

PackArgs make_pack_args(const void* w, std::int64_t stride_m, std::int64_t stride_k, int k,
                        const LceConfig& config, void* packed) {
  return {.w = static_cast<const std::uint16_t*>(w),
          .packed = static_cast<uint4*>(packed),
          .stride_m = stride_m,
          .stride_k = stride_k,
          .num_chunks = static_cast<std::int64_t>(lce_packed_bytes(k, config) / sizeof(uint4)),
          .k = k,
          .num_blocks_k = (k + kBlockK - 1) / kBlockK};
}

void launch_pack(const PackArgs& first, const PackArgs& second, int m, const LceConfig& config,
                 cudaStream_t stream) {
  constexpr int kPackThreads = 256;
  const std::int64_t chunks = first.num_chunks + second.num_chunks;
  if (chunks == 0) return;
  host::launch("ikbo::lce (pack)", lce_pack_kernel,
               {.grid = dim3(static_cast<unsigned>((chunks + kPackThreads - 1) / kPackThreads)),
                .threads = kPackThreads},
               stream, first, second, m, config.tile_m);
}

void run_sm90(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
              cudaStream_t stream) {
  const WorkspaceLayout layout = make_workspace_layout(params, config);
  auto* workspace = static_cast<unsigned char*>(params.workspace);
  const void* w_user = params.w_user_packed;
  const void* w_cand = params.w_cand_packed;
  PackArgs pack_user{};
  PackArgs pack_cand{};
  if (w_user == nullptr) {
    w_user = workspace + layout.w_user_packed;
    pack_user = make_pack_args(params.w_user, params.stride_w_user_m, params.stride_w_user_k,
                               params.k_user, config, workspace + layout.w_user_packed);
  }
  if (w_cand == nullptr) {
    w_cand = workspace + layout.w_cand_packed;
    pack_cand = make_pack_args(params.w_cand, params.stride_w_cand_m, params.stride_w_cand_k,
                               params.k_cand, config, workspace + layout.w_cand_packed);
  }
  const bool packs_weights = pack_user.num_chunks + pack_cand.num_chunks > 0;
  launch_pack(pack_user, pack_cand, params.m, config, stream);
  const Sm90Instance instance = find_instance(config.tile_m, params.dtype);
  auto* partial = reinterpret_cast<float4*>(workspace + layout.user_partial);
  const auto user_stage =
      config.user_units_per_cta == 2 ? instance.user_wide : instance.user_narrow;
  user_stage({params, config, limits.num_sms, w_user, partial, packs_weights, stream});
  instance.candidate({params, config, limits.num_sms, w_cand, partial, packs_weights, stream});
}

}  // namespace
}  // namespace lce_impl

void lce_pack(const void* w, std::int64_t stride_m, std::int64_t stride_k, int m, int k,
              DType dtype, const LceConfig& config, void* packed, Stream stream) {
  IKBO_CHECK(config.kernel == LceKernel::kSm90 && size_of(dtype) == 2,
             "ikbo::lce: a weight is packed for lce_sm90 and 16-bit types only; got ",
             to_string(config), " and ", name_of(dtype));
  lce_impl::launch_pack(lce_impl::make_pack_args(w, stride_m, stride_k, k, config, packed), {}, m,
                        config, stream);
}

void lce(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
         Stream stream) {
  if (params.num_candidates == 0 || params.m == 0 || params.n == 0) return;
  host::check_indices("lce", params.cand_to_user, params.num_candidates, params.num_users, stream);
  if (config.kernel == LceKernel::kSm90) {
    lce_impl::run_sm90(params, config, limits, stream);
  } else {
    lce_impl::run_generic(params, config, limits, stream);
  }
}

}  // namespace ikbo
