// SPDX-License-Identifier: Apache-2.0
// Host side of target_attention_backward's products, for one element type.
#pragma once

#include "kernels/host/launch.h"
#include "kernels/target_attention_backward/target_attention_backward.cuh"

namespace ikbo::target_attention_backward_impl {

template <typename Element, int kHeadDim>
void launch_typed(const Args& args, std::int64_t max_row_tiles, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(typename QueriesCta<Element, kHeadDim>::Shared);
  static_assert(kSharedBytes == sizeof(typename KeysCta<Element, kHeadDim>::Shared));
  const auto heads = static_cast<unsigned>(args.num_kv_heads);
  host::launch("ikbo::target_attention (grad_q)",
               target_attention_backward_queries_kernel<Element, kHeadDim>,
               {.grid = dim3(static_cast<unsigned>(max_row_tiles), heads),
                .threads = kThreads,
                .shared_bytes = kSharedBytes},
               stream, args);
  const std::int64_t key_tiles = (args.num_keys + kTileRows - 1) / kTileRows;
  host::launch("ikbo::target_attention (grad_k, grad_v)",
               target_attention_backward_keys_kernel<Element, kHeadDim>,
               {.grid = dim3(static_cast<unsigned>(key_tiles * args.num_users), heads),
                .threads = kThreads,
                .shared_bytes = kSharedBytes},
               stream, args);
}

template <typename Element>
void launch_products(const Args& args, const TargetAttentionBackwardConfig& config,
                     std::int64_t max_row_tiles, cudaStream_t stream) {
  switch (config.head_dim) {
    case 32:
      return launch_typed<Element, 32>(args, max_row_tiles, stream);
    case 64:
      return launch_typed<Element, 64>(args, max_row_tiles, stream);
    case 128:
      return launch_typed<Element, 128>(args, max_row_tiles, stream);
    default:
      detail::throw_error(__FILE__, __LINE__,
                          "ikbo::target_attention: no backward kernel with head_dim ",
                          config.head_dim, "; there are 32, 64, 128");
  }
}

}  // namespace ikbo::target_attention_backward_impl
