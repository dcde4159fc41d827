// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_sm90 with the histories' own rows; one head width each is compiled
// in instances/.
#pragma once

#include "kernels/target_attention/self_target_attention_layout.h"
#include "kernels/target_attention/target_attention_sm90_launch.h"

namespace ikbo::target_attention_impl {

struct Sm90SelfLaunch {
  const SelfTargetAttentionParams& params;
  const SelfTargetAttentionCudaConfig& config;
  unsigned char* workspace;
  int num_sms;
  cudaStream_t stream;
};

inline HistoryRows make_history_rows(const SelfTargetAttentionParams& p,
                                     const SelfTargetAttentionCudaConfig& config) {
  const int group = p.cand.num_heads / p.cand.num_kv_heads;
  return {.group = group,
          .is_causal = p.is_causal,
          .tile_rows = tile_rows_of(config.head_dim),
          .divide_by_group = device::FastDivide(group)};
}

// Defined by instances/self_target_attention_sm90_d<head_dim>.cu.
template <int kHeadDim>
void launch_self_sm90(const Sm90SelfLaunch& launch);

}  // namespace ikbo::target_attention_impl
