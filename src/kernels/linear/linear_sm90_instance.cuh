// SPDX-License-Identifier: Apache-2.0
// Host side of one linear_sm90 instance: tensor maps, arguments, launch.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/host/launch.h"
#include "kernels/host/tensor_map.h"
#include "kernels/linear/linear_sm90_kernel.cuh"
#include "kernels/linear/linear_sm90_launch.h"

namespace ikbo::linear_impl {

struct BoxedRows {
  RowBoxes boxes;
  bool has_zero_tails;  // the copy engine fills with zeros past K
  CUtensorMap map;
  CUtensorMap map_full;
};

// The maps of `rows` in groups of `group` rows, a tile being `tile_rows` of them.
inline BoxedRows make_boxed_rows(const RowMatrix& rows, int group, int tile_rows, DType dtype,
                                 const char* what) {
  const auto address = reinterpret_cast<std::uintptr_t>(rows.data);
  // One row may have any stride.
  const std::int64_t stride = rows.rows == 1 ? copied_stride(rows.k) : rows.stride;
  const bool is_aligned = stride % 8 == 0;
  const int offset = static_cast<int>(address % 16 / 2);
  const int remainder = (rows.rows - 1) % group + 1;
  const std::int64_t full_groups = rows.rows / group;
  const auto make_map = [&](std::int64_t groups, int residues) {
    const std::int64_t width = offset + rows.k + (is_aligned ? 0 : (residues - 1) * stride);
    return host::make_tensor_map({.data = reinterpret_cast<const void*>(address / 16 * 16),
                                  .dtype = dtype,
                                  .extent = {width, is_aligned ? residues : 1, groups},
                                  .stride = {is_aligned ? stride : group * stride, group * stride},
                                  .box = {kBlockK, 1, tile_rows / group}},
                                 what);
  };
  BoxedRows result;
  result.boxes = {.log2_group = std::countr_zero(static_cast<unsigned>(group)),
                  .remainder = remainder,
                  .offset = offset,
                  .x_step = is_aligned ? 0 : static_cast<int>(stride),
                  .y_step = is_aligned ? 1 : 0};
  result.has_zero_tails = is_aligned;
  result.map = make_map(ceil_div<std::int64_t>(rows.rows, group), remainder);
  // With no full group, residues past the remainder have no rows: in the first map they lie outside
  // and read as zeros.
  result.map_full = full_groups > 0 ? make_map(full_groups, group) : result.map;
  return result;
}

template <typename Traits>
void launch_stage(const StageLaunch& launch) {
  const LinearParams& p = launch.params;
  const bool is_user = launch.stage == Stage::kUser;
  const char* what = is_user ? "ikbo::linear (user stage)" : "ikbo::linear (candidate stage)";
  const int group = launch.x.rows == 1 ? 1 : rows_per_group(launch.x.stride);
  const BoxedRows x = make_boxed_rows(launch.x, group, Traits::kTileRows, p.dtype, what);
  const BoxedRows w = make_boxed_rows(launch.w, kWeightGroup, Traits::kTileM, p.dtype, what);
  const int k = launch.x.k;
  const int num_blocks_k = ceil_div(k, kBlockK);
  const int num_tiles_m = ceil_div(p.m, Traits::kTileM);
  const int num_tiles = ceil_div(launch.x.rows, Traits::kTileRows) * num_tiles_m;
  const int split_k = launch.tiling.split_k;
  const bool has_ragged_k = k % 16 != 0;
  const Sm90Args args{.x = x.boxes,
                      .w = w.boxes,
                      .user_partial = launch.user_partial,
                      .partial_columns = launch.partial_columns,
                      .bias = p.bias,
                      .cand_to_user = is_user ? nullptr : p.cand_to_user,
                      .out = p.out,
                      .activation = p.activation,
                      .m = p.m,
                      .num_rows = launch.x.rows,
                      .num_tiles = num_tiles,
                      .num_tiles_m = num_tiles_m,
                      .num_blocks_k = num_blocks_k,
                      .last_k = k - (num_blocks_k - 1) * kBlockK,
                      .split_k = split_k,
                      .clears_x = has_ragged_k && !x.has_zero_tails,
                      .clears_w = has_ragged_k && !w.has_zero_tails};
  const int num_ctas =
      split_k > 1 ? num_tiles * split_k : std::min(num_tiles, Traits::kCtasPerSm * launch.num_sms);
  host::launch(what, linear_sm90_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(num_ctas)),
                .threads = Traits::kNumThreads,
                .shared_bytes = Traits::kSharedBytes,
                .overlaps_previous = !is_user || launch.copies_weights,
                .cluster = split_k},
               launch.stream, args, x.map, x.map_full, w.map, w.map_full);
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
