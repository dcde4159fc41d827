// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_backward's products; instances/ has one file per element type.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/device/fast_divide.cuh"
#include "kernels/target_attention_backward/target_attention_backward_layout.h"

namespace ikbo::target_attention_backward_impl {

struct Args {
  const void* q;  // [B, Q, H, D]
  const void* k;  // [U, S, H_kv, D]
  const void* v;
  const void* out;
  const void* grad_out;
  const float* lse;
  const float* grad_lse;
  float* row_terms;
  void* grad_q;
  void* grad_k;
  void* grad_v;
  const std::int32_t* cand_to_user;
  const std::int64_t* order;
  std::int32_t* first_cands;
  std::int32_t* first_tiles;
  std::int32_t* num_keys_of_users;
  const std::int32_t* user_lengths;  // may be nullptr
  const std::int32_t* cand_lengths;  // may be nullptr
  int num_users;
  int num_candidates;
  int num_queries;
  int num_keys;  // S
  int num_heads;
  int num_kv_heads;
  int group;  // heads of a kv head
  int head_dim;
  float scale;
  float scale_log2;  // scale * log2(e)
  device::FastDivide divide_by_group;
  device::FastDivide divide_by_queries;

  __device__ __forceinline__ int rows_of(int candidates) const {
    return candidates * num_queries * group;
  }
};

// grad_q, then grad_k and grad_v. Defined by instances/target_attention_backward_<type>.cu.
template <typename Element>
void launch_products(const Args& args, const TargetAttentionBackwardConfig& config,
                     std::int64_t max_row_tiles, cudaStream_t stream);

}  // namespace ikbo::target_attention_backward_impl
