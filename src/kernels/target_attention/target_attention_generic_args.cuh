// SPDX-License-Identifier: Apache-2.0
// Arguments of target_attention_generic.
#pragma once

#include <cstdint>

#include "kernels/device/fast_divide.cuh"
#include "kernels/target_attention/target_attention_tiles.cuh"

namespace ikbo::target_attention_impl {

enum class CopyWidth : std::int8_t {
  kElement,  // of 2 bytes, through registers
  kWord,     // 4 bytes, asynchronously
  kVector,   // 16 bytes, likewise
};

struct GenericOperand {
  const void* data;
  std::int64_t stride[4];
  CopyWidth width;
  bool along_rows;  // neighbouring threads read neighbouring rows; never with kVector
};

struct GenericArgs {
  const std::int32_t* num_tiles;
  const Tile* tiles;  // [tiles, splits]
  const std::int32_t* grouped_cands;
  GenericOperand q;
  GenericOperand k;
  GenericOperand v;
  const std::int32_t* cand_lengths;  // may be nullptr
  const bool* user_mask;             // may be nullptr
  void* out;
  float* lse;
  float* partial_out;  // nullptr: keys are not split
  float* partial_lse;
  int num_keys;  // S
  int num_queries;
  int num_heads;
  int num_kv_heads;
  int group;  // heads of a kv head
  int head_dim;
  int num_splits;
  bool stores_vectors;
  float scale_log2;    // scale * log2(e), not 0
  float absent_logit;  // times scale_log2 it is -inf
  device::FastDivide divide_by_group;
  device::FastDivide divide_by_queries;
};

}  // namespace ikbo::target_attention_impl
