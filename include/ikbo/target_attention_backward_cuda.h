// SPDX-License-Identifier: Apache-2.0
// The gradients of target_attention on CUDA.
//
// With P = exp(scale q k^T - lse), 0 where a key does not count for a row, and
// dS = P (grad_out v^T - rowsum(grad_out out) + grad_lse):
//   grad_q = scale dS k,  grad_k = scale dS^T q,  grad_v = P^T grad_out
// grad_k and grad_v sum over all rows of all candidates of the user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ikbo/device_limits.h"
#include "ikbo/stream.h"
#include "ikbo/target_attention.h"

namespace ikbo {

struct TargetAttentionBackwardConfig {
  int head_dim = 0;  // D filled up to a width that the kernels are compiled for; 0: none takes it
};

// "target_attention_backward_mma<head_dim=128>", or "composite"
std::string to_string(const TargetAttentionBackwardConfig& config);

// Pure: reads sizes, dtype, and whether histories are packed or masked, which no kernel takes. All
// tensors are contiguous and begin at multiples of 16 bytes; D is a multiple of 8.
TargetAttentionBackwardConfig select_target_attention_backward_config(
    const TargetAttentionParams& params, const DeviceLimits& limits);

// 16-byte aligned, contents do not matter.
std::size_t target_attention_backward_workspace_bytes(const TargetAttentionParams& params);

// Launches the kernels on `stream`; no host synchronisation, no allocation. Sums are fp32, in the
// order of `order`, and rounded once: the same call gives the same bits. Throws ikbo::Error when a
// launch fails.
// `order`: int64 [B] on the device, the candidates user by user.
void target_attention_backward(const TargetAttentionGradParams& params,
                               const TargetAttentionBackwardConfig& config,
                               const std::int64_t* order, void* workspace, Stream stream);

}  // namespace ikbo
