// SPDX-License-Identifier: Apache-2.0
// Attention of each user's history to itself, and of candidates to it, in one launch on CUDA.
//
//   out_user[u, i, h, :] = softmax_s(scale * q_user[u, i, h, :] . k[u, s, g, :]) v[u, s, g, :]
//   with g = h / (H / H_kv), over the keys s < user_lengths[u] and, where causal, s <= i;
//   0 for queries i at or past the user's length, which may be NaN.
//
// The candidates' part is target_attention.h's. Both kinds of rows are tiles over the same K and V.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ikbo/target_attention_cuda.h"

namespace ikbo {

struct SelfTargetAttentionParams {
  // The candidates' part, and what both have: sizes, k, v, lengths, scale. No mask, not packed;
  // B and Q may be 0.
  TargetAttentionParams cand;
  const void* q_user = nullptr;  // [U, S, H, D], dtype of q
  std::array<std::int64_t, 4> stride_q_user{};
  bool is_causal = false;
  // Outputs, contiguous.
  void* out_user = nullptr;  // [U, S, H, D]
  void* lse_user = nullptr;  // [U, H, S] float32, -inf for a query without a key
};

enum class SelfTargetAttentionKernel : std::int8_t {
  kNone,  // no CUDA kernel takes these params: the composite does
  kSm90,  // target attention's, over tiles of both kinds
};

struct SelfTargetAttentionCudaConfig {
  SelfTargetAttentionKernel kernel = SelfTargetAttentionKernel::kNone;
  int head_dim = 0;   // D filled up to a width that the kernel is compiled for
  int key_block = 0;  // keys between two rescalings of the online softmax
};

// "self_target_attention_sm90<head_dim=128,key_block=128>"
std::string to_string(const SelfTargetAttentionCudaConfig& config);

// Pure: reads sizes, strides, dtype, scale and the alignment of the pointers.
SelfTargetAttentionCudaConfig select_self_target_attention_cuda_config(
    const SelfTargetAttentionParams& params, const DeviceLimits& limits);

// Bytes of workspace that self_target_attention() needs; 256-byte aligned, contents do not matter.
std::size_t self_target_attention_workspace_bytes(const SelfTargetAttentionParams& params,
                                                  const SelfTargetAttentionCudaConfig& config);

// Launches the kernels on `stream`, as target_attention() does: no host synchronisation, no
// allocation, values of the index and of the lengths unchecked. Throws ikbo::Error when the launch
// fails.
void self_target_attention(const SelfTargetAttentionParams& params,
                           const SelfTargetAttentionCudaConfig& config, const DeviceLimits& limits,
                           void* workspace, Stream stream);

}  // namespace ikbo
