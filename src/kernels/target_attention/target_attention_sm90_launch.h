// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_sm90; one head width each is compiled in instances/.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/target_attention/target_attention_tiles.cuh"

namespace ikbo::target_attention_impl {

struct Sm90Launch {
  const TargetAttentionParams& params;
  const TargetAttentionCudaConfig& config;
  unsigned char* workspace;
  int num_sms;
  cudaStream_t stream;
};

inline Histories make_histories(const TargetAttentionParams& p,
                                const TargetAttentionCudaConfig& config) {
  return {.user_lengths = p.user_lengths,
          .user_offsets = p.user_offsets,
          .cand_lengths = p.cand_lengths,
          .num_keys = p.num_keys,
          .key_block = config.key_block,
          .num_splits = config.num_splits,
          .divide_by_key_block = device::FastDivide(config.key_block),
          .divide_by_splits = device::FastDivide(config.num_splits)};
}

// Defined by instances/target_attention_sm90_d<head_dim>.cu.
template <int kHeadDim>
void launch_sm90(const Sm90Launch& launch);

}  // namespace ikbo::target_attention_impl
