// SPDX-License-Identifier: Apache-2.0
// Launches of one stage of lce_sm90; the table's rows are compiled in instances/.
#pragma once

#include <cuda_runtime_api.h>

#include "ikbo/lce.h"

namespace ikbo::lce_impl {

struct StageLaunch {
  const LceParams& params;
  const LceConfig& config;
  int num_sms;
  const void* w_user_packed;
  const void* w_cand_packed;
  float4* user_partial;
  bool overlaps_previous;  // the launch before this one is a part of the same call
  cudaStream_t stream;
};

using LaunchFunction = void (*)(const StageLaunch&);

// The stages of one tile width and element type.
struct Sm90Instance {
  LaunchFunction user_narrow;     // one unit per CTA: fills the device with few users
  LaunchFunction user_wide;       // two units per CTA share the weight tile
  LaunchFunction candidate;       // one tensor
  LaunchFunction candidate_list;  // up to lce_max_parts tensors
  LaunchFunction dual;            // one tensor, no user stage
};

// Defined by instances/lce_sm90_m<tile_m>.cu.
template <int kTileM>
Sm90Instance make_sm90_instance(DType dtype);

}  // namespace ikbo::lce_impl
