// SPDX-License-Identifier: Apache-2.0
// ikbo::self_target_attention on CUDA: groups the candidates by user, then runs the kernel.
#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"
#include "kernels/target_attention/self_target_attention_group.cuh"
#include "kernels/target_attention/self_target_attention_sm90_launch.h"

namespace ikbo {
namespace target_attention_impl {
namespace {

void launch_group(const Sm90SelfLaunch& launch) {
  const TargetAttentionParams& p = launch.params.cand;
  const WorkspaceLayout layout = make_workspace_layout(launch.params, launch.config);
  const auto ints = [&](std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(launch.workspace + offset);
  };
  const GroupArgs list{
      .groups = {.cand_to_user = p.cand_to_user,
                 .num_users = p.num_users,
                 .num_candidates = p.num_candidates,
                 .rows_of_candidate = static_cast<int>(rows_of_candidate(p)),
                 .tile_rows = tile_rows_of(launch.config.head_dim),
                 .num_tiles = ints(layout.num_tiles),
                 .users = ints(layout.users),
                 .grouped_cands = ints(layout.grouped_cands)},
      .histories = make_histories(p, cand_config(launch.config)),
      .num_keys_of_users = ints(layout.users) + std::int64_t{device::kGroupArrays} * p.num_users,
      .tiles = reinterpret_cast<Tile*>(launch.workspace + layout.tiles)};
  host::launch("ikbo::self_target_attention (grouping)", self_target_attention_group_kernel,
               {.grid = dim3(1),
                .threads = device::kGroupThreads,
                .shared_bytes = device::group_shared_bytes(p.num_users, kUserArrays)},
               launch.stream,
               SelfGroupArgs{.list = list, .own = make_history_rows(launch.params, launch.config)});
}

void launch_instance(const Sm90SelfLaunch& launch) {
  switch (launch.config.head_dim) {
    case 32:
      return launch_self_sm90<32>(launch);
    case 64:
      return launch_self_sm90<64>(launch);
    case 96:
      return launch_self_sm90<96>(launch);
    case 128:
      return launch_self_sm90<128>(launch);
    case 192:
      return launch_self_sm90<192>(launch);
    case 256:
      return launch_self_sm90<256>(launch);
    default:
      detail::throw_error(__FILE__, __LINE__,
                          "ikbo::self_target_attention: no target_attention_sm90 kernel with "
                          "head_dim ",
                          launch.config.head_dim, "; there are 32, 64, 96, 128, 192, 256");
  }
}

}  // namespace
}  // namespace target_attention_impl

void self_target_attention(const SelfTargetAttentionParams& params,
                           const SelfTargetAttentionCudaConfig& config, const DeviceLimits& limits,
                           void* workspace, Stream stream) {
  const TargetAttentionParams& cand = params.cand;
  if (cand.num_heads == 0) return;
  IKBO_CHECK(config.kernel == SelfTargetAttentionKernel::kSm90,
             "ikbo::self_target_attention: a CUDA kernel is needed; got ", to_string(config));
  host::check_indices("self_target_attention", cand.cand_to_user, cand.num_candidates,
                      cand.num_users, stream);
  const target_attention_impl::Sm90SelfLaunch launch{
      .params = params,
      .config = config,
      .workspace = static_cast<unsigned char*>(workspace),
      .num_sms = limits.num_sms,
      .stream = stream};
  if (!target_attention_impl::groups_in_each_cta(params, config.head_dim)) {
    target_attention_impl::launch_group(launch);
  }
  target_attention_impl::launch_instance(launch);
}

}  // namespace ikbo
