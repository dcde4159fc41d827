// SPDX-License-Identifier: Apache-2.0
// Target attention on CUDA; the formula and the params are those of target_attention.h.
//
// Rows (candidate, query, head of a kv head) of one user are packed into full tiles, whatever the
// order of the candidates and however few queries each has. K and V are read where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ikbo/device_limits.h"
#include "ikbo/stream.h"
#include "ikbo/target_attention.h"

namespace ikbo {

enum class TargetAttentionKernel : std::int8_t {
  kNone,     // no CUDA kernel takes these params: the composite does
  kSm90,     // warp-specialised TMA + wgmma, persistent
  kGeneric,  // compute capability 8.0 and newer: mma.sync for 16-bit types, multiply-adds for fp32
};

struct TargetAttentionCudaConfig {
  TargetAttentionKernel kernel = TargetAttentionKernel::kNone;
  int head_dim = 0;    // D filled up to a width that the kernel is compiled for
  int key_block = 0;   // keys between two rescalings of the online softmax
  int num_splits = 1;  // ranges of a user's keys that different CTAs work on
};

// "target_attention_sm90<head_dim=128,key_block=128>", or "...,splits=33>" with few rows;
// "target_attention_generic<...>" likewise
std::string to_string(const TargetAttentionCudaConfig& config);

// Pure: reads sizes, strides, dtype, scale and the alignment of the pointers.
TargetAttentionCudaConfig select_target_attention_cuda_config(const TargetAttentionParams& params,
                                                              const DeviceLimits& limits);

// Bytes of workspace that target_attention() needs; 256-byte aligned, contents do not matter.
std::size_t target_attention_workspace_bytes(const TargetAttentionParams& params,
                                             const TargetAttentionCudaConfig& config);

// Launches the kernels on `stream`; no host synchronisation, no allocation: safe under CUDA graph
// capture, and on several streams at once with one workspace each. Throws ikbo::Error when the
// launch fails.
// NOTE: values of the index and of the lengths are not checked on the device, unless the library
// was built with IKBO_CHECK_INDICES, which checks the index.
void target_attention(const TargetAttentionParams& params, const TargetAttentionCudaConfig& config,
                      const DeviceLimits& limits, void* workspace, Stream stream);

}  // namespace ikbo
