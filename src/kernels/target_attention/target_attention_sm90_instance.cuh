// SPDX-License-Identifier: Apache-2.0
// Host side of one target_attention_sm90 instance: tensor maps, arguments, launch.
#pragma once

#include <algorithm>
#include <numeric>

#include "kernels/host/launch.h"
#include "kernels/host/tensor_map.h"
#include "kernels/target_attention/target_attention_merge.cuh"
#include "kernels/target_attention/target_attention_sm90.cuh"
#include "kernels/target_attention/target_attention_sm90_launch.h"

namespace ikbo::target_attention_impl {

template <typename Traits>
CUtensorMap make_history_map(const void* data, const std::array<std::int64_t, 4>& stride,
                             const TargetAttentionParams& p) {
  const bool is_packed = p.user_offsets != nullptr;
  return host::make_tensor_map(
      host::TensorMap4d{
          .data = data,
          .dtype = p.dtype,
          .extent = {p.head_dim, p.num_keys, p.num_kv_heads, is_packed ? 1 : p.num_users},
          .stride = {stride[1], stride[2], is_packed ? stride[1] : stride[0]},
          .box = {Traits::kChunkColumns, Traits::kKeyBlock, 1, 1}},
      "ikbo::target_attention");
}

// Rows that move together. Either of one candidate, a swizzle pattern's 8 or more of them: from any
// multiple of their number on, rows of a user lie in such a box. Or all of a consumer, of
// candidates that have few rows and follow each other in the batch.
struct RowBox {
  int heads = 0;
  int queries = 0;
  int candidates = 0;  // 0: there is no such box
};
// The copy engine needs strides above zero.
inline bool has_row_strides(const TargetAttentionParams& p) {
  return p.stride_q[0] > 0 && p.stride_q[1] > 0 && p.stride_q[2] > 0;
}
inline RowBox row_box_of(const TargetAttentionParams& p) {
  const int group = p.num_heads / p.num_kv_heads;
  const int heads = std::gcd(group, kRowsOfConsumer);
  const int queries = heads == group ? std::gcd(p.num_queries, kRowsOfConsumer / heads) : 1;
  if (p.num_candidates == 0 || p.num_queries == 0 || !has_row_strides(p)) return {};
  if (heads * queries >= 8) return {heads, queries, 1};
  const bool is_whole = heads == group && queries == p.num_queries;
  return is_whole ? RowBox{heads, queries, kRowsOfConsumer / (heads * queries)} : RowBox{};
}

template <typename Traits>
CUtensorMap make_row_map(const void* data, const std::array<std::int64_t, 4>& stride,
                         const RowBox& box, const TargetAttentionParams& p) {
  return host::make_tensor_map(
      host::TensorMap4d{.data = data,
                        .dtype = p.dtype,
                        .extent = {p.head_dim, p.num_heads, p.num_queries, p.num_candidates},
                        .stride = {stride[2], stride[1], stride[0]},
                        .box = {Traits::kChunkColumns, box.heads, box.queries, box.candidates}},
      "ikbo::target_attention");
}

// What both operators have. `own_tiles`: of the histories' own rows, at most.
template <typename Traits>
void fill_params(const Sm90Launch& launch, const WorkspaceLayout& layout, bool groups_in_cta,
                 std::int64_t own_tiles, Sm90Params& params) {
  const TargetAttentionParams& p = launch.params;
  const bool is_split = launch.config.num_splits > 1;
  const auto at = [&](std::size_t offset) { return launch.workspace + offset; };
  params.k = make_history_map<Traits>(p.k, p.stride_k, p);
  params.v = make_history_map<Traits>(p.v, p.stride_v, p);
  const RowBox box = row_box_of(p);
  const int box_rows = box.candidates == 1 ? box.heads * box.queries : 0;
  if (box.candidates > 0) {
    const std::int64_t out_row = std::int64_t{p.num_heads} * p.head_dim;
    params.q = make_row_map<Traits>(p.q, p.stride_q, box, p);
    params.out =
        make_row_map<Traits>(p.out, {p.num_queries * out_row, out_row, p.head_dim, 1}, box, p);
  }
  params.args = {
      .num_tiles = reinterpret_cast<std::int32_t*>(at(layout.num_tiles)),
      .tiles = reinterpret_cast<Tile*>(at(layout.tiles)),
      .grouped_cands = reinterpret_cast<std::int32_t*>(at(layout.grouped_cands)),
      .groups_in_each_cta = groups_in_cta,
      .cand_to_user = p.cand_to_user,
      .num_users = p.num_users,
      .num_candidates = p.num_candidates,
      .rows_of_candidate = static_cast<int>(rows_of_candidate(p)),
      .histories = make_histories(p, launch.config),
      .max_tiles = static_cast<int>(max_tiles(p, launch.config) + own_tiles),
      .num_splits = launch.config.num_splits,
      .q = p.q,
      .out = p.out,
      .lse = static_cast<float*>(p.lse),
      .partial_out = is_split ? reinterpret_cast<float*>(at(layout.partial_out)) : nullptr,
      .partial_lse = reinterpret_cast<float*>(at(layout.partial_lse)),
      .stride_q = {p.stride_q[0], p.stride_q[1], p.stride_q[2]},
      .num_queries = p.num_queries,
      .num_heads = p.num_heads,
      .num_kv_heads = p.num_kv_heads,
      .group = p.num_heads / p.num_kv_heads,
      .box_rows = box_rows,
      // A CTA's own list has the candidates of a user in the order of the batch.
      .moves_runs = box.candidates > 1 && groups_in_cta,
      .divide_by_box = device::FastDivide(std::max(box_rows, 1)),
      .divide_by_group = device::FastDivide(p.num_heads / p.num_kv_heads),
      .divide_by_queries = device::FastDivide(std::max(p.num_queries, 1)),
      .divide_by_kv_heads = device::FastDivide(p.num_kv_heads),
      .head_dim = p.head_dim,
      .scale = static_cast<float>(p.scale),
      .scale_log2 = static_cast<float>(p.scale * 1.4426950408889634)};
}

template <typename Traits>
void launch_typed(const Sm90Launch& launch) {
  const TargetAttentionParams& p = launch.params;
  Sm90Params params{};
  fill_params<Traits>(launch, make_workspace_layout(p, launch.config), groups_in_each_cta(p), 0,
                      params);
  host::launch("ikbo::target_attention", target_attention_sm90_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(launch.num_sms)),
                .threads = Traits::kNumThreads,
                .shared_bytes = Traits::kSharedBytes,
                .overlaps_previous = !params.args.groups_in_each_cta},
               launch.stream, params);
  if (launch.config.num_splits == 1) return;
  host::launch("ikbo::target_attention (merge)", target_attention_merge_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(max_tiles(p, launch.config) * p.num_kv_heads),
                             Traits::kTileRows / kMergeRows),
                .threads = kMergeThreads,
                .overlaps_previous = true},
               launch.stream, params.args);
}

template <int kHeadDim>
void launch_sm90(const Sm90Launch& launch) {
  if (launch.params.dtype == DType::kFloat16) {
    launch_typed<Sm90Traits<__half, kHeadDim>>(launch);
  } else {
    launch_typed<Sm90Traits<__nv_bfloat16, kHeadDim>>(launch);
  }
}

}  // namespace ikbo::target_attention_impl
