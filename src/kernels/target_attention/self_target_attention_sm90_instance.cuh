// SPDX-License-Identifier: Apache-2.0
// Host side of one instance of target_attention_sm90 with the histories' own rows.
#pragma once

#include "kernels/target_attention/self_target_attention_sm90_launch.h"
#include "kernels/target_attention/target_attention_sm90_instance.cuh"

namespace ikbo::target_attention_impl {

// As row_box_of, of a history's rows; the last box may reach beyond them.
inline RowBox own_box_of(const TargetAttentionParams& own) {
  const int group = own.num_heads / own.num_kv_heads;
  const int heads = std::gcd(group, kRowsOfConsumer);
  const int queries = heads == group ? kRowsOfConsumer / heads : 1;
  return has_row_strides(own) && heads * queries >= 8 ? RowBox{heads, queries, 1} : RowBox{};
}

template <typename Traits>
void fill_own(const Sm90SelfLaunch& launch, Sm90SelfParams& params) {
  const TargetAttentionParams own = own_part(launch.params);
  const RowBox box = own_box_of(own);
  const int box_rows = box.heads * box.queries;
  if (box_rows > 0) {
    const std::int64_t out_row = std::int64_t{own.num_heads} * own.head_dim;
    params.q_user = make_row_map<Traits>(own.q, own.stride_q, box, own);
    params.out_user = make_row_map<Traits>(
        own.out, {own.num_queries * out_row, out_row, own.head_dim, 1}, box, own);
  }
  params.own = {.rows = make_history_rows(launch.params, launch.config),
                .num_levels = own_tiles_of_user(launch.params, launch.config.head_dim),
                .q = own.q,
                .out = own.out,
                .lse = static_cast<float*>(own.lse),
                .stride_q = {own.stride_q[0], own.stride_q[1], own.stride_q[2]},
                .box_rows = box_rows,
                .divide_by_box = device::FastDivide(std::max(box_rows, 1))};
}

template <typename Traits>
void launch_self_typed(const Sm90SelfLaunch& launch) {
  const int head_dim = launch.config.head_dim;
  const TargetAttentionCudaConfig config = cand_config(launch.config);
  Sm90SelfParams params{};
  fill_params<Traits>({.params = launch.params.cand,
                       .config = config,
                       .workspace = launch.workspace,
                       .num_sms = launch.num_sms,
                       .stream = launch.stream},
                      make_workspace_layout(launch.params, launch.config),
                      groups_in_each_cta(launch.params, head_dim),
                      max_own_tiles(launch.params, head_dim), params);
  fill_own<Traits>(launch, params);
  host::launch("ikbo::self_target_attention", target_attention_sm90_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(launch.num_sms)),
                .threads = Traits::kNumThreads,
                .shared_bytes = Traits::kSharedBytes,
                .overlaps_previous = !params.args.groups_in_each_cta},
               launch.stream, params);
}

template <int kHeadDim>
void launch_self_sm90(const Sm90SelfLaunch& launch) {
  if (launch.params.cand.dtype == DType::kFloat16) {
    launch_self_typed<Sm90Traits<__half, kHeadDim, true>>(launch);
  } else {
    launch_self_typed<Sm90Traits<__nv_bfloat16, kHeadDim, true>>(launch);
  }
}

}  // namespace ikbo::target_attention_impl
