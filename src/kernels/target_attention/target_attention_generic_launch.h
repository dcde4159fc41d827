// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_generic; one element type each is compiled in instances/.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "kernels/target_attention/target_attention_generic_args.cuh"

namespace ikbo::target_attention_impl {

struct GenericLaunch {
  GenericArgs args;        // but for stores_vectors
  int head_dim;            // that of the config
  std::int64_t max_tiles;  // of all kv heads, not counting splits
  int num_sms;
  cudaStream_t stream;
};

// Defined by instances/target_attention_generic_<element>.cu.
template <typename Element>
void launch_generic_of(const GenericLaunch& launch);

}  // namespace ikbo::target_attention_impl
