// SPDX-License-Identifier: Apache-2.0
// Launches of bmm_sm90 and of what goes ahead of it; one width of the tile of P each is compiled in
// instances/.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/bmm/bmm_layout.h"

namespace ikbo::bmm_impl {

struct Sm90Launch {
  const BmmParams& params;
  const BmmCudaConfig& config;
  unsigned char* workspace;
  int num_sms;
  cudaStream_t stream;
};

// Lists the candidates user by user in the workspace, or notes that the batch is such a list. A
// grid that overlaps it may follow.
void launch_list(const BmmParams& params, unsigned char* workspace, cudaStream_t stream);

// Defined by instances/bmm_sm90_p<tile_p>.cu.
template <int kTileP>
void launch_sm90(const Sm90Launch& launch);

}  // namespace ikbo::bmm_impl
