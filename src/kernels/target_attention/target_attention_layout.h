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

// Consumer warpgroups of a CTA: a third one, where registers allow it, fills the time in which two
// wait for the special function units.
inline constexpr int consumers_of(int head_dim) { return head_dim <= 64 ? 3 : 2; }
// Keys of a block: what shared memory and the registers beside the accumulators have room for.
inline constexpr int key_block_of(int head_dim) {
  return head_dim <= 64 || head_dim > 128 ? 64 : 128;
}
inline constexpr int tile_rows_of(int head_dim) { return consumers_of(head_dim) * kRowsOfConsumer; }

// Of the generic kernel. Q and a block of K and of V fit into the 99 KB of shared memory that a CTA
// has on every architecture since sm_80.
inline constexpr int kGenericTileRows = 64;
inline constexpr int generic_key_block_of(int row_bytes) {
  return row_bytes <= 256 ? 64 : row_bytes <= 512 ? 32 : 16;
}

inline int tile_rows_of(const TargetAttentionCudaConfig& config) {
  return config.kernel == TargetAttentionKernel::kGeneric ? kGenericTileRows
                                                          : tile_rows_of(config.head_dim);
}

inline constexpr int kMaxSplits = 64;  // of a user's keys
// Tiles of a history's own causal rows that a CTA lists by itself.
inline constexpr int kMaxLevelsOfCta = 1024;

inline constexpr int kUserArrays = device::kGroupArrays + 1;  // with the users' counts of keys

// Whose queries the rows of a tile are: self_target_attention has both kinds.
enum class RowsOf : std::int32_t { kCandidates, kHistory };

// Rows of one user that a CTA computes together, with a range of the keys that count for any of
// them; every kv head has the same tiles.
// Row r of a user is head r % G of query r / G % Q of its candidate number r / (Q * G), or of query
// r / G of its history.
struct Tile {
  std::int32_t history;      // where the user's history lies: the user; 0 where they are packed
  std::int32_t first_key;    // of the range, as a row of that history
  std::int32_t num_keys;     // of the range
  std::int32_t keys_before;  // the range, of the user's
  std::int32_t first_cand;   // position of the user's first candidate in the grouped list
  std::int32_t first_row;
  std::int32_t num_rows;  // at most tile_rows_of(head_dim)
  RowsOf rows_of;
};
static_assert(sizeof(Tile) == 32);

struct WorkspaceLayout {          // offsets in bytes
  std::size_t num_tiles = 0;      // int32, not counting splits
  std::size_t users = 0;          // int32 [kUserArrays, U]: scratch of the grouping
  std::size_t grouped_cands = 0;  // int32 [B]: candidates, user by user
  std::size_t tiles = 0;          // Tile [tiles, splits]
  // Where keys are split, what each range comes to: [tiles, splits, kv heads, rows].
  std::size_t partial_out = 0;  // float [.., D of the kernel]
  std::size_t partial_lse = 0;  // float [..]
  std::size_t total_bytes = 0;
};

// Ordering users that differ in keys takes as long as the square of their number.
inline constexpr int kMaxUnevenUsersOfCta = 256;
inline bool groups_in_each_cta(const TargetAttentionParams& p) {
  const bool is_uneven =
      p.user_lengths != nullptr || p.user_offsets != nullptr || p.cand_lengths != nullptr;
  return p.num_candidates <= device::kMaxCandsOfCta &&
         p.num_users <= (is_uneven ? kMaxUnevenUsersOfCta : device::kMaxUsersOfCta);
}

inline std::int64_t rows_of_candidate(const TargetAttentionParams& p) {
  return p.num_kv_heads == 0 ? 0 : std::int64_t{p.num_queries} * (p.num_heads / p.num_kv_heads);
}

// A bound, not counting splits: each user with candidates has at most one tile that is not full.
inline std::int64_t max_tiles(const TargetAttentionParams& p,
                              const TargetAttentionCudaConfig& config) {
  const std::int64_t rows = rows_of_candidate(p) * p.num_candidates;
  return rows / tile_rows_of(config) + std::min(p.num_users, p.num_candidates);
}

// `own_tiles`: of the histories' own rows.
inline WorkspaceLayout make_workspace_layout(const TargetAttentionParams& p,
                                             const TargetAttentionCudaConfig& config,
                                             std::int64_t own_tiles = 0) {
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  WorkspaceLayout layout;
  layout.users = 256;
  layout.grouped_cands = layout.users + align(sizeof(std::int32_t) * kUserArrays * p.num_users);
  layout.tiles = layout.grouped_cands + align(std::size_t{4} * p.num_candidates);
  const auto tiles = static_cast<std::size_t>(max_tiles(p, config) * config.num_splits + own_tiles);
  layout.partial_out = layout.tiles + align(sizeof(Tile) * tiles);
  const std::size_t rows =
      config.num_splits > 1 ? tiles * p.num_kv_heads * tile_rows_of(config) : 0;
  layout.partial_lse = layout.partial_out + align(sizeof(float) * rows * config.head_dim);
  layout.total_bytes = layout.partial_lse + align(sizeof(float) * rows);
  return layout;
}

}  // namespace ikbo::target_attention_impl
