// SPDX-License-Identifier: Apache-2.0
// Launches of one stage of linear_sm90; the tilings are compiled in instances/.
#pragma once

#include <cuda_runtime_api.h>

#include "ikbo/linear.h"

namespace ikbo::linear_impl {

enum class Stage { kUser, kCandidate };

// A tensor [rows, k] of which k is contiguous.
struct RowMatrix {
  const void* data;
  std::int64_t stride;
  int rows;
  int k;
  LinearFeed feed;  // any but kCopied
};

struct StageLaunch {
  const LinearParams& params;
  Stage stage;
  LinearTiling tiling;
  RowMatrix x;
  RowMatrix w;
  float* user_partial;
  std::int64_t partial_columns;
  int num_sms;
  bool copies_weights;  // the launch before the user stage copies weights
  cudaStream_t stream;
};

// Tilings with tile_m columns; defined by instances/linear_sm90_m<tile_m>.cu.
template <int kTileM>
void launch_sm90(const StageLaunch& launch);

}  // namespace ikbo::linear_impl
