// SPDX-License-Identifier: Apache-2.0
// Host side of one lce_sm90 instance: tensor maps, arguments, launch.
#pragma once

#include <algorithm>

#include "kernels/host/launch.h"
#include "kernels/host/tensor_map.h"
#include "kernels/lce/lce_sm90.cuh"
#include "kernels/lce/lce_sm90_launch.h"

namespace ikbo::lce_impl {

inline CUtensorMap make_map_e(const LcePart& part, const LceParams& params, int batch,
                              const char* what) {
  return host::make_tensor_map(host::TensorMap3d{.data = part.e,
                                                 .dtype = params.dtype,
                                                 .extent = {params.n, part.k, batch},
                                                 .stride = {part.stride_k, part.stride_b},
                                                 .box = {kSliceN, kBlockK, 1}},
                               what);
}

// The packed weight is read as rows of 512 B.
inline CUtensorMap make_map_w(const void* packed, int padded_k, int tile_bytes,
                              const StageLaunch& launch, const char* what) {
  constexpr int kRow = kPackedRowBytes / 2;
  const auto rows =
      static_cast<std::int64_t>(lce_packed_bytes(padded_k, launch.config) / kPackedRowBytes);
  return host::make_tensor_map(host::TensorMap3d{.data = packed,
                                                 .dtype = launch.params.dtype,
                                                 .extent = {kRow, rows, 1},
                                                 .stride = {kRow, kRow * rows},
                                                 .box = {kRow, tile_bytes / kPackedRowBytes, 1},
                                                 .swizzle_bytes = 0},
                               what);
}

// The tensors that k of a stage runs over, in order.
template <typename Traits>
void fill_operands(typename Traits::Params& out, const StageLaunch& launch, const char* what) {
  const LceParams& p = launch.params;
  const auto add = [&](const LcePart& part, int batch) {
    if (part.k == 0) return;
    const int blocks = lce_padded_k(part.k) / kBlockK;
    const int at = out.args.num_parts++;
    out.e[at] = make_map_e(part, p, batch, what);
    out.parts[at] = {.num_blocks = blocks,
                     .last_steps = (part.k - (blocks - 1) * kBlockK + 15) / 16};
    out.args.num_blocks_k += blocks;
  };
  int num_weights = 0;
  if constexpr (Traits::kStage != Stage::kCandidate) {
    add({p.e_user, p.k_user, p.stride_e_user_u, p.stride_e_user_k, p.stride_e_user_n}, p.num_users);
    out.w[num_weights++] =
        make_map_w(launch.w_user_packed, lce_padded_k(p.k_user), Traits::kTileWBytes, launch, what);
  }
  if constexpr (Traits::kStage != Stage::kUser) {
    LcePart one;
    for (const LcePart& part : candidate_parts(p, one)) add(part, p.num_candidates);
    out.w[num_weights++] =
        make_map_w(launch.w_cand_packed, padded_k_cand(p), Traits::kTileWBytes, launch, what);
    out.out = host::make_tensor_map(
        host::TensorMap3d{.data = p.out,
                          .dtype = p.dtype,
                          .extent = {p.n, p.m, p.num_candidates},
                          .stride = {p.n, static_cast<std::int64_t>(p.m) * p.n},
                          .box = {kSliceN, Traits::kTileM, 1}},
        what);
  }
}

template <typename Traits>
void launch_stage(const StageLaunch& launch) {
  constexpr bool kIsUser = Traits::kStage == Stage::kUser;
  constexpr const char* kWhat = kIsUser ? "ikbo::lce (user stage)" : "ikbo::lce (candidate stage)";
  const LceParams& p = launch.params;
  const int batch = kIsUser ? p.num_users : p.num_candidates;
  const int num_slices = (p.n + kSliceN - 1) / kSliceN;
  typename Traits::Params params{};
  params.args = Sm90Args{.user_partial = launch.user_partial,
                         .bias = p.bias,
                         .cand_to_user = p.cand_to_user,
                         .m = p.m,
                         .batch = batch,
                         .num_slices = num_slices,
                         .num_tiles_m = launch.config.num_tiles_m,
                         .split = split_lce(batch, num_slices, launch.config.num_tiles_m,
                                            Traits::kConsumers, launch.num_sms)};
  fill_operands<Traits>(params, launch, kWhat);
  host::launch(
      kWhat, lce_sm90_kernel<Traits>,
      {.grid = dim3(static_cast<unsigned>(std::min(params.args.split.num_items, launch.num_sms))),
       .threads = Traits::kNumThreads,
       .shared_bytes = Traits::kSharedBytes,
       .overlaps_previous = launch.overlaps_previous},
      launch.stream, params);
}

template <typename Element, int kTileM>
Sm90Instance make_typed_instance() {
  return {launch_stage<Sm90Traits<Element, kTileM, 1, Stage::kUser, 1>>,
          launch_stage<Sm90Traits<Element, kTileM, 2, Stage::kUser, 1>>,
          launch_stage<Sm90Traits<Element, kTileM, 2, Stage::kCandidate, 1>>,
          launch_stage<Sm90Traits<Element, kTileM, 2, Stage::kCandidate, lce_max_parts>>,
          launch_stage<Sm90Traits<Element, kTileM, 2, Stage::kDual, 2>>};
}

template <int kTileM>
Sm90Instance make_sm90_instance(DType dtype) {
  return dtype == DType::kFloat16 ? make_typed_instance<__half, kTileM>()
                                  : make_typed_instance<__nv_bfloat16, kTileM>();
}

}  // namespace ikbo::lce_impl
