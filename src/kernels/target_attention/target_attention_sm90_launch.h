// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_sm90; one head width each is compiled in instances/.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

struct Sm90Launch {
  const TargetAttentionParams& params;
  unsigned char* workspace;
  int num_sms;
  cudaStream_t stream;
};

// Keys of a block: what shared memory and the registers beside the accumulators have room for.
inline constexpr int key_block_of(int head_dim) {
  return head_dim <= 128 ? 128 : head_dim == 192 ? 96 : 64;
}

// Defined by instances/target_attention_sm90_d<head_dim>.cu.
template <int kHeadDim>
void launch_sm90(const Sm90Launch& launch);

}  // namespace ikbo::target_attention_impl
