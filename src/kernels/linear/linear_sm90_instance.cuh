// SPDX-License-Identifier: Apache-2.0
// Host side of one linear_sm90 instance: tensor maps, arguments, launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/host/launch.h"
#include "kernels/host/tensor_map.h"
#include "kernels/linear/linear_sm90_kernel.cuh"
#include "kernels/linear/linear_sm90_launch.h"

namespace ikbo::linear_impl {

// Box of `box_rows` rows of x, 64 k each; past K and past the last row it reads zeros.
inline CUtensorMap make_x_map(const RowMatrix& x, int box_rows, DType dtype, const char* what) {
  if (x.feed != LinearFeed::kTma) return {};
  // The stride of a single row is never used, but must be one.
  const std::int64_t stride = x.rows == 1 ? copied_stride(x.k) : x.stride;
  return host::make_tensor_map(host::TensorMap3d{.data = x.data,
                                                 .dtype = dtype,
                                                 .extent = {x.k, 1, x.rows},
                                                 .stride = {stride, stride},
                                                 .box = {kBlockK, 1, box_rows}},
                               what);
}

// Groups of four rows of w: (k, row of a group, group), a box being one row of `box_groups` groups.
// `residues` of them exist in each of the `groups`.
inline CUtensorMap make_w_map(const RowMatrix& w, int residues, int groups, int box_groups,
                              DType dtype, const char* what) {
  if (w.feed != LinearFeed::kTma) return {};
  const std::int64_t stride = w.rows == 1 ? copied_stride(w.k) : w.stride;
  return host::make_tensor_map(host::TensorMap3d{.data = w.data,
                                                 .dtype = dtype,
                                                 .extent = {w.k, residues, groups},
                                                 .stride = {stride, 4 * stride},
                                                 .box = {kBlockK, 1, box_groups}},
                               what);
}

template <typename Traits>
void launch_stage(const StageLaunch& launch) {
  const LinearParams& p = launch.params;
  const bool is_user = launch.stage == Stage::kUser;
  const char* what = is_user ? "ikbo::linear (user stage)" : "ikbo::linear (candidate stage)";
  const int m = launch.w.rows;
  constexpr int kBoxGroups = Traits::kTileM / 4;
  const CUtensorMap map_x = make_x_map(launch.x, Traits::kTileRows, p.dtype, what);
  const CUtensorMap map_w =
      make_w_map(launch.w, (m - 1) % 4 + 1, ceil_div(m, 4), kBoxGroups, p.dtype, what);
  // With fewer than four rows, the other residues lie outside of the first map and read as zeros.
  const CUtensorMap map_w_full =
      m < 4 ? map_w : make_w_map(launch.w, 4, m / 4, kBoxGroups, p.dtype, what);
  const int k = launch.x.k;
  const int num_blocks_k = ceil_div(k, kBlockK);
  const int num_tiles_m = ceil_div(p.m, Traits::kTileM);
  const int num_tiles = ceil_div(launch.x.rows, Traits::kTileRows) * num_tiles_m;
  const int split_k = launch.tiling.split_k;
  const auto source_of = [](const RowMatrix& rows) {
    return RowSource{rows.data, rows.stride, rows.rows, rows.feed};
  };
  const Sm90Args args{.x = source_of(launch.x),
                      .w = source_of(launch.w),
                      .user_partial = launch.user_partial,
                      .partial_columns = launch.partial_columns,
                      .bias = p.bias,
                      .cand_to_user = is_user ? nullptr : p.cand_to_user,
                      .out = p.out,
                      .activation = p.activation,
                      .m = p.m,
                      .k = k,
                      .num_tiles = num_tiles,
                      .num_tiles_m = num_tiles_m,
                      .num_blocks_k = num_blocks_k,
                      .split_k = split_k};
  const int num_ctas =
      split_k > 1 ? num_tiles * split_k : std::min(num_tiles, Traits::kCtasPerSm * launch.num_sms);
  host::launch(what, linear_sm90_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(num_ctas)),
                .threads = Traits::kNumThreads,
                .shared_bytes = Traits::kSharedBytes,
                .overlaps_previous = !is_user || launch.copies_weights,
                .cluster = split_k},
               launch.stream, args, map_x, map_w, map_w_full);
}

template <int kTileM, int kConsumers>
void launch_typed(const StageLaunch& launch) {
  if (launch.params.dtype == DType::kFloat16) {
    launch_stage<Sm90Traits<__half, kTileM, kConsumers>>(launch);
  } else {
    launch_stage<Sm90Traits<__nv_bfloat16, kTileM, kConsumers>>(launch);
  }
}

template <int kTileM>
void launch_sm90(const StageLaunch& launch) {
  if constexpr (kTileM == 64) {
    if (launch.tiling.tile_rows == 64) return launch_typed<kTileM, 1>(launch);
  }
  launch_typed<kTileM, 2>(launch);
}

}  // namespace ikbo::linear_impl
