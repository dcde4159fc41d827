// SPDX-License-Identifier: Apache-2.0
// ikbo::target_attention on CUDA: groups the candidates by user, then runs the chosen kernel.
#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"
#include "kernels/target_attention/target_attention_generic.h"
#include "kernels/target_attention/target_attention_group.cuh"
#include "kernels/target_attention/target_attention_sm90_launch.h"

namespace ikbo {
namespace target_attention_impl {
namespace {

void launch_group(const TargetAttentionParams& p, const TargetAttentionCudaConfig& config,
                  unsigned char* workspace, cudaStream_t stream) {
  const WorkspaceLayout layout = make_workspace_layout(p, config);
  const auto ints = [&](std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(workspace + offset);
  };
  host::launch("ikbo::target_attention (grouping)", target_attention_group_kernel,
               {.grid = dim3(1),
                .threads = device::kGroupThreads,
                .shared_bytes = device::group_shared_bytes(p.num_users, kUserArrays)},
               stream,
               GroupArgs{.groups = {.cand_to_user = p.cand_to_user,
                                    .num_users = p.num_users,
                                    .num_candidates = p.num_candidates,
                                    .rows_of_candidate = static_cast<int>(rows_of_candidate(p)),
                                    .tile_rows = tile_rows_of(config),
                                    .num_tiles = ints(layout.num_tiles),
                                    .users = ints(layout.users),
                                    .grouped_cands = ints(layout.grouped_cands)},
                         .histories = make_histories(p, config),
                         .num_keys_of_users =
                             ints(layout.users) + std::int64_t{device::kGroupArrays} * p.num_users,
                         .tiles = reinterpret_cast<Tile*>(workspace + layout.tiles)});
}

void launch_instance(const Sm90Launch& launch) {
  switch (launch.config.head_dim) {
    case 32:
      return launch_sm90<32>(launch);
    case 64:
      return launch_sm90<64>(launch);
    case 96:
      return launch_sm90<96>(launch);
    case 128:
      return launch_sm90<128>(launch);
    case 192:
      return launch_sm90<192>(launch);
    case 256:
      return launch_sm90<256>(launch);
    default:
      detail::throw_error(__FILE__, __LINE__,
                          "ikbo::target_attention: no target_attention_sm90 kernel with head_dim ",
                          launch.config.head_dim, "; there are 32, 64, 96, 128, 192, 256");
  }
}

}  // namespace
}  // namespace target_attention_impl

void target_attention(const TargetAttentionParams& params, const TargetAttentionCudaConfig& config,
                      const DeviceLimits& limits, void* workspace, Stream stream) {
  if (params.num_candidates == 0 || params.num_queries == 0 || params.num_heads == 0) return;
  IKBO_CHECK(config.kernel != TargetAttentionKernel::kNone,
             "ikbo::target_attention: a CUDA kernel is needed; got ", to_string(config));
  host::check_indices("target_attention", params.cand_to_user, params.num_candidates,
                      params.num_users, stream);
  auto* bytes = static_cast<unsigned char*>(workspace);
  const bool is_generic = config.kernel == TargetAttentionKernel::kGeneric;
  if (is_generic || !target_attention_impl::groups_in_each_cta(params)) {
    target_attention_impl::launch_group(params, config, bytes, stream);
  }
  if (is_generic) {
    return target_attention_impl::launch_generic(params, config, limits.num_sms, bytes, stream);
  }
  target_attention_impl::launch_instance({.params = params,
                                          .config = config,
                                          .workspace = bytes,
                                          .num_sms = limits.num_sms,
                                          .stream = stream});
}

}  // namespace ikbo
