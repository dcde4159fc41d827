// SPDX-License-Identifier: Apache-2.0
// What the kernels of target attention share with their host side: the list of tiles and where it
// lies in the workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ikbo/target_attention_cuda.h"
#include "kernels/device/candidate_groups_layout.h"

namespace ikbo::target_attention_impl {

inline constexpr int kThreads = 128;        // of a warpgroup
inline constexpr int kRowsOfConsumer = 64;  // rows of a consumer warpgroup
inline constexpr int kConsumers = 2;
inline constexpr int kTileRows = kConsumers * kRowsOfConsumer;

// Rows of one user that a CTA computes together; every kv head has the same tiles.
// Row r of a user is head r % G of query r / G % Q of its candidate number r / (Q * G).
struct Tile {
  std::int32_t user;
  std::int32_t first_cand;  // position of the user's first candidate in the grouped list
  std::int32_t first_row;
  std::int32_t num_rows;  // at most kTileRows
  std::int32_t num_keys;  // of the user
  std::int32_t unused[3];
};
static_assert(sizeof(Tile) == 32);

struct WorkspaceLayout {          // offsets in bytes
  std::size_t num_tiles = 0;      // int32
  std::size_t users = 0;          // int32 [kGroupArrays, U]: scratch of the grouping
  std::size_t grouped_cands = 0;  // int32 [B]: candidates, user by user
  std::size_t tiles = 0;          // Tile []
  std::size_t total_bytes = 0;
};

inline std::int64_t rows_of_candidate(const TargetAttentionParams& p) {
  return p.num_kv_heads == 0 ? 0 : std::int64_t{p.num_queries} * (p.num_heads / p.num_kv_heads);
}

// A bound: each user with candidates has at most one tile that is not full.
inline std::int64_t max_tiles(const TargetAttentionParams& p) {
  const std::int64_t rows = rows_of_candidate(p) * p.num_candidates;
  return rows / kTileRows + std::min(p.num_users, p.num_candidates);
}

inline WorkspaceLayout make_workspace_layout(const TargetAttentionParams& p) {
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  WorkspaceLayout layout;
  layout.users = 256;
  layout.grouped_cands =
      layout.users + align(sizeof(std::int32_t) * device::kGroupArrays * p.num_users);
  layout.tiles = layout.grouped_cands + align(std::size_t{4} * p.num_candidates);
  layout.total_bytes = layout.tiles + align(sizeof(Tile) * max_tiles(p));
  return layout;
}

}  // namespace ikbo::target_attention_impl
