// SPDX-License-Identifier: Apache-2.0
// Host side of one bmm_sm90 instance: tensor maps, arguments, launch.
#pragma once

#include <algorithm>

#include "kernels/bmm/bmm_sm90.cuh"
#include "kernels/bmm/bmm_sm90_launch.h"
#include "kernels/host/launch.h"
#include "kernels/host/tensor_map.h"

namespace ikbo::bmm_impl {

inline constexpr const char* kWhat = "ikbo::bmm";

// A matrix whose contiguous dimension is R or the other one.
struct MatrixMap {
  const void* data;
  BmmInner inner;
  int batch;
  int size_out;  // P or N
  std::int64_t stride_batch;
  std::int64_t stride_sum;
  std::int64_t stride_out;
  int box_out;       // rows of a box where R is contiguous
  int row_out = 64;  // length of its rows where the other dimension is
};

inline CUtensorMap make_map(const MatrixMap& m, const BmmParams& p) {
  const bool is_sum = m.inner == BmmInner::kSum;
  host::TensorMap3d spec{.data = m.data, .dtype = p.dtype};
  spec.extent[0] = is_sum ? p.r : m.size_out;
  spec.extent[1] = is_sum ? m.size_out : p.r;
  spec.extent[2] = m.batch;
  spec.stride[0] = is_sum ? m.stride_out : m.stride_sum;
  spec.stride[1] = m.stride_batch;
  spec.box[0] = is_sum ? kBlockR : m.row_out;
  spec.box[1] = is_sum ? m.box_out : kBlockR;
  spec.box[2] = 1;
  spec.swizzle_bytes = spec.box[0] * 2;
  return host::make_tensor_map(spec, kWhat);
}

// Results of a box's columns, row after row of P, are 128-byte rows of their own, whatever N is.
inline CUtensorMap make_out_map(const BmmParams& p) {
  const int row = std::max(p.n, kTileColumns);
  host::TensorMap3d spec{.data = p.out, .dtype = p.dtype};
  spec.extent[0] = row;
  spec.extent[1] = std::int64_t{p.p} * p.n / row;
  spec.extent[2] = p.num_candidates;
  spec.stride[0] = row;
  spec.stride[1] = std::int64_t{p.p} * p.n;
  spec.box[0] = kTileColumns;
  spec.box[1] = box_columns_of(p.n);
  spec.box[2] = 1;
  return host::make_tensor_map(spec, kWhat);
}

// `size` elements a batch entry.
inline Ahead make_ahead(const void* data, int batch, std::int64_t stride, std::int64_t size) {
  return {data, stride == size ? batch * size * 2 : 0};
}

template <typename Traits>
void launch_typed(const Sm90Launch& launch) {
  const BmmParams& p = launch.params;
  const BmmCudaConfig& config = launch.config;
  const WorkspaceLayout layout = make_workspace_layout(p);
  const auto at = [&](std::size_t offset) { return launch.workspace + offset; };
  const int num_blocks = blocks_of(p.r);
  const int columns = p.num_candidates * p.n;
  const int grain = grain_of(p, launch.num_sms);
  const int num_grains = (columns + grain - 1) / grain;
  Sm90Params params{};
  params.a = make_map({.data = p.a_user,
                       .inner = Traits::kInnerA,
                       .batch = p.num_users,
                       .size_out = p.p,
                       .stride_batch = p.stride_a_u,
                       .stride_sum = p.stride_a_r,
                       .stride_out = p.stride_a_p,
                       .box_out = Traits::kTileP},
                      p);
  if (config.feed == BmmFeed::kTma) {
    params.b = make_map({.data = p.b_cand,
                         .inner = Traits::kInnerB,
                         .batch = p.num_candidates,
                         .size_out = p.n,
                         .stride_batch = p.stride_b_b,
                         .stride_sum = p.stride_b_r,
                         .stride_out = p.stride_b_n,
                         .box_out = box_columns_of(p.n),
                         .row_out = box_columns_of(p.n)},
                        p);
  }
  if (config.store == BmmStore::kTma) params.out = make_out_map(p);
  params.args = {
      .is_sorted = reinterpret_cast<std::int32_t*>(at(layout.is_sorted)),
      .grouped_cands = reinterpret_cast<std::int32_t*>(at(layout.grouped_cands)),
      .groups_in_each_cta = groups_in_each_cta(p),
      .cand_to_user = p.cand_to_user,
      .num_users = p.num_users,
      .num_candidates = p.num_candidates,
      .a_ahead = make_ahead(p.a_user, p.num_users, p.stride_a_u, std::int64_t{p.p} * p.r),
      .b_ahead = make_ahead(p.b_cand, p.num_candidates, p.stride_b_b, std::int64_t{p.r} * p.n),
      .b_cand = p.b_cand,
      .out = p.out,
      .stride_b_b = p.stride_b_b,
      .stride_b_inner = Traits::kInnerB == BmmInner::kSum ? p.stride_b_n : p.stride_b_r,
      .p = p.p,
      .r = p.r,
      .n = p.n,
      .divide_by_n = device::FastDivide(p.n),
      .divide_by_ctas = device::FastDivide(launch.num_sms),
      .grain = grain,
      .num_grains = num_grains,
      .padding = num_grains * grain - columns,
      .divide_by_grains = device::FastDivide(num_grains),
      .num_tiles_p = (p.p + Traits::kTileP - 1) / Traits::kTileP,
      .num_blocks = num_blocks,
      .last_steps = (p.r - (num_blocks - 1) * kBlockR + 15) / 16,
      .streams_user = config.streams_user,
      .user_slots = config.user_slots,
      .slot_blocks = blocks_of_slot(config, num_blocks),
      .stages = config.stages,
      .ring_stages = config.streams_user ? config.stages / kConsumers : config.stages,
      .feed = config.feed,
      .store = config.store,
      .box_columns = box_columns_of(p.n),
      .row_columns = config.feed == BmmFeed::kTma ? box_columns_of(p.n) : kTileColumns};
  host::launch(kWhat, bmm_sm90_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(launch.num_sms)),
                .threads = Traits::kNumThreads,
                .shared_bytes = shared_bytes(config, num_blocks),
                .overlaps_previous = !params.args.groups_in_each_cta},
               launch.stream, params);
}

template <typename Element, int kTileP>
void launch_oriented(const Sm90Launch& launch) {
  constexpr BmmInner kSum = BmmInner::kSum;
  constexpr BmmInner kOut = BmmInner::kOut;
  const bool is_sum_a = launch.config.a_inner == kSum;
  const bool is_sum_b = launch.config.b_inner == kSum;
  if (is_sum_a && is_sum_b) return launch_typed<Sm90Traits<Element, kTileP, kSum, kSum>>(launch);
  if (is_sum_a) return launch_typed<Sm90Traits<Element, kTileP, kSum, kOut>>(launch);
  if (is_sum_b) return launch_typed<Sm90Traits<Element, kTileP, kOut, kSum>>(launch);
  launch_typed<Sm90Traits<Element, kTileP, kOut, kOut>>(launch);
}

template <int kTileP>
void launch_sm90(const Sm90Launch& launch) {
  if (launch.params.dtype == DType::kFloat16) {
    launch_oriented<__half, kTileP>(launch);
  } else {
    launch_oriented<__nv_bfloat16, kTileP>(launch);
  }
}

}  // namespace ikbo::bmm_impl
