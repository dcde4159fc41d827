// SPDX-License-Identifier: Apache-2.0
// Which width the backward kernels of target attention run with.
#include <cstdint>
#include <limits>

#include "kernels/target_attention_backward/target_attention_backward_layout.h"

namespace ikbo {

std::string to_string(const TargetAttentionBackwardConfig& config) {
  if (config.head_dim == 0) return "composite";
  return "target_attention_backward_mma<head_dim=" + std::to_string(config.head_dim) + ">";
}

TargetAttentionBackwardConfig select_target_attention_backward_config(
    const TargetAttentionParams& p, const DeviceLimits& limits) {
  const bool has_work = p.num_candidates > 0 && p.num_queries > 0 && p.num_heads > 0 &&
                        p.num_users > 0 && p.num_keys > 0;
  const bool is_taken = size_of(p.dtype) == 2 && p.user_mask == nullptr &&
                        p.user_offsets == nullptr && p.head_dim % 8 == 0;
  if (limits.compute_capability < 80 || !has_work || !is_taken) return {};
  // Rows of a kv head, of all candidates, are counted in int32, tiles in a grid's first axis, kv
  // heads in its second.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  using target_attention_backward_impl::kTileRows;
  const std::int64_t rows = target_attention_backward_impl::rows_of_candidate(p) * p.num_candidates;
  const std::int64_t key_tiles = (p.num_keys + kTileRows - 1) / kTileRows;
  if (rows > kMost - kTileRows || key_tiles * p.num_users > kMost || p.num_kv_heads > 65535 ||
      std::int64_t{p.num_candidates} * p.num_queries * p.num_heads > kMost) {
    return {};
  }
  for (const int head_dim : {32, 64, 128}) {
    if (p.head_dim <= head_dim) return {.head_dim = head_dim};
  }
  return {};
}

std::size_t target_attention_backward_workspace_bytes(const TargetAttentionParams& params) {
  return target_attention_backward_impl::make_workspace_layout(params).total_bytes;
}

}  // namespace ikbo
