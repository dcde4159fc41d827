// SPDX-License-Identifier: Apache-2.0
// The list of tiles, and bmm without the instructions of one architecture: compute capability 8.0
// and newer, any stride, alignment and size.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/bmm/bmm_layout.h"

namespace ikbo::bmm_impl {

// Groups the candidates by user into the workspace. A grid that overlaps it may follow.
void launch_group(const BmmParams& params, unsigned char* workspace, cudaStream_t stream);

// On the list of tiles that launch_group makes; `config` names a generic kernel, P and N are not 0.
void launch_generic(const BmmParams& params, const BmmCudaConfig& config, int num_sms,
                    unsigned char* workspace, cudaStream_t stream);

}  // namespace ikbo::bmm_impl
