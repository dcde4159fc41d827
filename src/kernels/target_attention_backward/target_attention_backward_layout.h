// SPDX-License-Identifier: Apache-2.0
// What the kernels of target_attention_backward share with their host side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ikbo/target_attention_backward_cuda.h"

namespace ikbo::target_attention_backward_impl {

inline constexpr int kTileRows = 64;  // rows of a user, or keys, that a CTA owns
inline constexpr int kBlock = 64;     // of the other kind, at a time
inline constexpr int kThreads = 128;
inline constexpr int kListThreads = 1024;

inline std::int64_t rows_of_candidate(const TargetAttentionParams& p) {
  return std::int64_t{p.num_queries} * (p.num_heads / p.num_kv_heads);
}

// A bound: each user with candidates has at most one tile that is not full.
inline std::int64_t max_row_tiles(const TargetAttentionParams& p) {
  return rows_of_candidate(p) * p.num_candidates / kTileRows +
         std::min(p.num_users, p.num_candidates);
}

struct WorkspaceLayout {        // offsets in bytes
  std::size_t first_cands = 0;  // int32 [U + 1]: of each user, in the order of users
  std::size_t first_tiles = 0;  // int32 [U + 1]: likewise, tiles of rows
  std::size_t num_keys = 0;     // int32 [U]: keys that count for any candidate of the user
  std::size_t row_terms = 0;    // float [B, H, Q]: rowsum(grad_out out) - grad_lse
  std::size_t total_bytes = 0;
};

inline WorkspaceLayout make_workspace_layout(const TargetAttentionParams& p) {
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t users = align(sizeof(std::int32_t) * (std::size_t(p.num_users) + 1));
  WorkspaceLayout layout;
  layout.first_tiles = users;
  layout.num_keys = 2 * users;
  layout.row_terms = 3 * users;
  layout.total_bytes = layout.row_terms + sizeof(float) * std::size_t(p.num_candidates) *
                                              std::size_t(p.num_heads) * std::size_t(p.num_queries);
  return layout;
}

}  // namespace ikbo::target_attention_backward_impl
