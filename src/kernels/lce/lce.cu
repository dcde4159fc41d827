// SPDX-License-Identifier: Apache-2.0
// ikbo::lce on CUDA: packs what is not packed, then user stage and candidate stage of the chosen
// kernel.
#include <cstdint>
#include <span>

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

// The image of a weight whose columns meet tensors of `k` columns each.
template <int kMaxParts>
PackArgs<kMaxParts> make_pack_args(const void* w, std::int64_t stride_m, std::int64_t stride_k,
                                   std::span<const LcePart> parts, const LceConfig& config,
                                   void* packed) {
  PackArgs<kMaxParts> args{
      .packed = static_cast<uint4*>(packed), .stride_m = stride_m, .stride_k = stride_k};
  const auto* columns = static_cast<const std::uint16_t*>(w);
  for (const LcePart& part : parts) {
    if (part.k == 0) continue;
    args.parts[args.num_parts++] = {columns, part.k, args.num_blocks_k};
    args.num_blocks_k += lce_padded_k(part.k) / kBlockK;
    columns += part.k * stride_k;
  }
  args.num_chunks = static_cast<std::int64_t>(
      lce_packed_bytes(args.num_blocks_k * kBlockK, config) / sizeof(uint4));
  return args;
}

// Whether there was anything to pack.
bool launch_pack(const PackArgs<1>& user, const PackArgs<lce_max_parts>& cand, int m,
                 const LceConfig& config, cudaStream_t stream) {
  constexpr int kPackThreads = 256;
  const std::int64_t chunks = user.num_chunks + cand.num_chunks;
  if (chunks == 0) return false;
  host::launch("ikbo::lce (pack)", lce_pack_kernel,
               {.grid = dim3(static_cast<unsigned>((chunks + kPackThreads - 1) / kPackThreads)),
                .threads = kPackThreads},
               stream, user, cand, m, config.tile_m);
  return true;
}

void run_sm90(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
              cudaStream_t stream) {
  const WorkspaceLayout layout = make_workspace_layout(params, config);
  auto* workspace = static_cast<unsigned char*>(params.workspace);
  const void* w_user = params.w_user_packed;
  const void* w_cand = params.w_cand_packed;
  PackArgs<1> pack_user{};
  PackArgs<lce_max_parts> pack_cand{};
  if (w_user == nullptr) {
    w_user = workspace + layout.w_user_packed;
    const LcePart part{.k = params.k_user};
    pack_user = make_pack_args<1>(params.w_user, params.stride_w_user_m, params.stride_w_user_k,
                                  {&part, 1}, config, workspace + layout.w_user_packed);
  }
  if (w_cand == nullptr) {
    w_cand = workspace + layout.w_cand_packed;
    LcePart one;
    pack_cand = make_pack_args<lce_max_parts>(params.w_cand, params.stride_w_cand_m,
                                              params.stride_w_cand_k, candidate_parts(params, one),
                                              config, workspace + layout.w_cand_packed);
  }
  const bool packs = launch_pack(pack_user, pack_cand, params.m, config, stream);
  const Sm90Instance instance = find_instance(config.tile_m, params.dtype);
  StageLaunch stage{.params = params,
                    .config = config,
                    .num_sms = limits.num_sms,
                    .w_user_packed = w_user,
                    .w_cand_packed = w_cand,
                    .user_partial = reinterpret_cast<float4*>(workspace + layout.user_partial),
                    .overlaps_previous = packs,
                    .stream = stream};
  if (config.dual_k) {
    instance.dual(stage);
    return;
  }
  (config.user_units_per_cta == 2 ? instance.user_wide : instance.user_narrow)(stage);
  stage.overlaps_previous = true;
  (params.num_cand_parts > 1 ? instance.candidate_list : instance.candidate)(stage);
}

}  // namespace
}  // namespace lce_impl

void lce_pack(const void* w, std::int64_t stride_m, std::int64_t stride_k, int m, int k,
              DType dtype, const LceConfig& config, void* packed, Stream stream) {
  IKBO_CHECK(config.kernel == LceKernel::kSm90 && size_of(dtype) == 2,
             "ikbo::lce: a weight is packed for lce_sm90 and 16-bit types only; got ",
             to_string(config), " and ", name_of(dtype));
  const LcePart part{.k = k};
  lce_impl::launch_pack(
      lce_impl::make_pack_args<1>(w, stride_m, stride_k, {&part, 1}, config, packed), {}, m, config,
      stream);
}

void lce(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
         Stream stream) {
  if (params.num_candidates == 0 || params.m == 0 || params.n == 0) return;
  host::check_indices("lce", params.cand_to_user, params.num_candidates, params.num_users, stream);
  if (config.kernel == LceKernel::kSm90) {
    lce_impl::run_sm90(params, config, limits, stream);
  } else {
    IKBO_CHECK(params.num_cand_parts <= 1, "ikbo::lce: ", to_string(config),
               " takes one e_cand; got a list of ", params.num_cand_parts);
    lce_impl::run_generic(params, config, limits, stream);
  }
}

}  // namespace ikbo
