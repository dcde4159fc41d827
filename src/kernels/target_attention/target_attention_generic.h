// SPDX-License-Identifier: Apache-2.0
// Target attention without the instructions of one architecture: compute capability 8.0 and newer,
// any stride and alignment, D up to 256.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

// On the list of tiles in the workspace; `config` names the generic kernel, B, Q and H are not 0.
void launch_generic(const TargetAttentionParams& params, const TargetAttentionCudaConfig& config,
                    int num_sms, unsigned char* workspace, cudaStream_t stream);

}  // namespace ikbo::target_attention_impl
