// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_sm90; one head width each is compiled in instances/.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

struct Sm90Launch {
  const TargetAttentionParams& params;
  const TargetAttentionCudaConfig& config;
  unsigned char* workspace;
  int num_sms;
  cudaStream_t stream;
};

// Defined by instances/target_attention_sm90_d<head_dim>.cu.
template <int kHeadDim>
void launch_sm90(const Sm90Launch& launch);

}  // namespace ikbo::target_attention_impl
