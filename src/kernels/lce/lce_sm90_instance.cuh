// SPDX-License-Identifier: Apache-2.0
// Host side of one lce_sm90 instance: tensor maps, arguments, launch.
#pragma once

#include <algorithm>

#include "kernels/host/launch.h"
#include "kernels/host/tensor_map.h"
#include "kernels/lce/lce_sm90.cuh"
#include "kernels/lce/lce_sm90_launch.h"

namespace ikbo::lce_impl {

template <typename Traits>
void launch_stage(const StageLaunch& launch) {
  constexpr bool kIsUser = Traits::kStage == Stage::kUser;
  constexpr const char* kWhat = kIsUser ? "ikbo::lce (user stage)" : "ikbo::lce (candidate stage)";
  const LceParams& p = launch.params;
  const int batch = kIsUser ? p.num_users : p.num_candidates;
  const int k = kIsUser ? p.k_user : p.k_cand;
  const int num_slices = (p.n + kSliceN - 1) / kSliceN;
  const int num_blocks_k = (k + kBlockK - 1) / kBlockK;
  const Sm90Args args{.user_partial = launch.user_partial,
                      .bias = p.bias,
                      .cand_to_user = p.cand_to_user,
                      .m = p.m,
                      .num_units = batch * num_slices,
                      .num_slices = num_slices,
                      .num_tiles_m = launch.config.num_tiles_m,
                      .num_blocks_k = num_blocks_k,
                      .last_steps_k = (k - (num_blocks_k - 1) * kBlockK + 15) / 16};
  const CUtensorMap map_e =
      host::make_tensor_map({.data = kIsUser ? p.e_user : p.e_cand,
                             .dtype = p.dtype,
                             .extent = {p.n, k, batch},
                             .stride = {kIsUser ? p.stride_e_user_k : p.stride_e_cand_k,
                                        kIsUser ? p.stride_e_user_u : p.stride_e_cand_b},
                             .box = {kSliceN, kBlockK, 1}},
                            kWhat);
  constexpr int kPackedRow = kPackedRowBytes / 2;
  const std::int64_t packed_rows =
      static_cast<std::int64_t>(lce_packed_bytes(k, launch.config) / kPackedRowBytes);
  const CUtensorMap map_w =
      host::make_tensor_map({.data = launch.w_packed,
                             .dtype = p.dtype,
                             .extent = {kPackedRow, packed_rows, 1},
                             .stride = {kPackedRow, kPackedRow * packed_rows},
                             .box = {kPackedRow, Traits::kTileWBytes / kPackedRowBytes, 1},
                             .swizzles = false},
                            kWhat);
  // The user stage stores fragments, not tiles: its second map is never used.
  const CUtensorMap map_out =
      kIsUser ? map_e
              : host::make_tensor_map({.data = p.out,
                                       .dtype = p.dtype,
                                       .extent = {p.n, p.m, batch},
                                       .stride = {p.n, static_cast<std::int64_t>(p.m) * p.n},
                                       .box = {kSliceN, Traits::kTileM, 1}},
                                      kWhat);
  const int num_tiles =
      (args.num_units + Traits::kConsumers - 1) / Traits::kConsumers * args.num_tiles_m;
  host::launch(kWhat, lce_sm90_kernel<Traits>,
               {.grid = dim3(static_cast<unsigned>(std::min(num_tiles, launch.num_sms))),
                .threads = Traits::kNumThreads,
                .shared_bytes = Traits::kSharedBytes,
                .overlaps_previous = !kIsUser || launch.packs_weights},
               launch.stream, args, map_e, map_w, map_out);
}

template <typename Element, int kTileM>
Sm90Instance make_typed_instance(DType dtype) {
  return {kTileM, dtype, launch_stage<Sm90Traits<Element, kTileM, 1, Stage::kUser>>,
          launch_stage<Sm90Traits<Element, kTileM, 2, Stage::kUser>>,
          launch_stage<Sm90Traits<Element, kTileM, 2, Stage::kCandidate>>};
}

template <int kTileM>
Sm90Instance make_sm90_instance(DType dtype) {
  return dtype == DType::kFloat16 ? make_typed_instance<__half, kTileM>(dtype)
                                  : make_typed_instance<__nv_bfloat16, kTileM>(dtype);
}

}  // namespace ikbo::lce_impl
