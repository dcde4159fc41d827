// SPDX-License-Identifier: Apache-2.0
// What the kernels of bmm share with their host side: lists of candidates and of tiles, where they
// lie in the workspace, and how shared memory is divided.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ikbo/bmm_cuda.h"
#include "kernels/device/candidate_groups_layout.h"

namespace ikbo::bmm_impl {

// Columns of one user that are computed together; every tile of P has the same. Candidates lie side
// by side, user by user: column c of the list is column c % N of its candidate number c / N.
inline constexpr int kTileColumns = 64;

struct alignas(16) Tile {
  std::int32_t user;
  std::int32_t first_cand;    // its position in the list
  std::int32_t first_column;  // of those from that candidate on
  std::int32_t num_columns;   // at most kTileColumns
};

struct WorkspaceLayout {          // offsets in bytes
  std::size_t num_tiles = 0;      // int32
  std::size_t is_sorted = 0;      // int32; whether the batch itself is the list
  std::size_t users = 0;          // scratch of the grouping
  std::size_t grouped_cands = 0;  // int32 [B]: candidates, user by user
  std::size_t tiles = 0;          // Tile []
  std::size_t total_bytes = 0;
};

// A bound: each user with candidates has at most one tile that is not full.
inline std::int64_t max_tiles(const BmmParams& p) {
  return std::int64_t{p.num_candidates} * p.n / kTileColumns +
         std::min(p.num_users, p.num_candidates);
}

inline bool groups_in_each_cta(const BmmParams& p) {
  return p.num_candidates <= device::kMaxCandsOfCta && p.num_users <= device::kMaxUsersOfCta;
}

inline WorkspaceLayout make_workspace_layout(const BmmParams& p) {
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  WorkspaceLayout layout;
  layout.is_sorted = sizeof(std::int32_t);
  layout.users = 256;
  layout.grouped_cands =
      layout.users + align(sizeof(std::int32_t) * device::kGroupArrays * p.num_users);
  layout.tiles = layout.grouped_cands + align(std::size_t{4} * p.num_candidates);
  layout.total_bytes = layout.tiles + align(sizeof(Tile) * max_tiles(p));
  return layout;
}

// Of the sm_90a kernel.
inline constexpr int kThreads = 128;  // of a warpgroup
inline constexpr int kConsumers = 2;
inline constexpr int kBlockR = 64;  // 128 bytes, the row of a swizzle pattern
inline constexpr int kStageBytes = kTileColumns * kBlockR * 2;
inline constexpr int kStagingRows = 64;  // of P that a consumer stores at a time
inline constexpr int kStagingBytes = kStagingRows * kTileColumns * 2;
inline constexpr int kStagingBuffers = 3;  // of each consumer
inline constexpr int kLeastStages = 6;
inline constexpr int kMaxStages = 16;
inline constexpr int kMaxUserSlots = 8;
inline constexpr int kTileSlots = 8;  // that are announced at once
inline constexpr int kBarrierBytes =
    (2 * kMaxStages + 2 * kMaxUserSlots + kConsumers + 2 * kTileSlots) *
    static_cast<int>(sizeof(std::uint64_t));
// What the producer tells the consumers of a tile.
struct alignas(16) AnnouncedTile {
  std::int32_t first_cand;
  std::int32_t first_column;
  std::int32_t tile_p;
  std::int32_t num_columns_and_flags;
};
// Beside the tiles that are announced, what a CTA that groups for itself keeps: its own share of
// the list, where it fits.
inline constexpr int kOwnCands = 256;
struct OwnList {
  AnnouncedTile tiles[kTileSlots];
  std::int32_t users[kOwnCands];
  std::int32_t cands[kOwnCands];
  std::uint64_t users_loaded;  // barrier
};
inline constexpr int kMaxSharedBytes = 232448;

inline constexpr int blocks_of(int r) { return (r + kBlockR - 1) / kBlockR; }
inline constexpr int user_bytes(int tile_p, int num_blocks) {
  return tile_p * kBlockR * 2 * num_blocks;
}
inline int blocks_of_slot(const BmmCudaConfig& config, int num_blocks) {
  return config.streams_user ? 1 : num_blocks;
}
inline int shared_bytes(const BmmCudaConfig& config, int num_blocks) {
  return config.user_slots * user_bytes(config.tile_p, blocks_of_slot(config, num_blocks)) +
         config.stages * kStageBytes + kConsumers * kStagingBuffers * kStagingBytes +
         kBarrierBytes + static_cast<int>(sizeof(OwnList));
}

// CTAs share out the columns by so many: what no copy divides; where each gets some, all candidates
// of a tile.
inline int grain_of(const BmmParams& p, int num_ctas) {
  if (p.n % kTileColumns == 0) return kTileColumns;
  if (p.n > kTileColumns) return 8;
  const int of_tile = kTileColumns / p.n * p.n;
  return std::int64_t{p.num_candidates} * p.n >= std::int64_t{num_ctas} * of_tile ? of_tile : p.n;
}

// Columns of a box of the copy engine, in b_cand and in out: of one candidate.
inline constexpr int box_columns_of(int n) { return n < kTileColumns ? n : kTileColumns; }

}  // namespace ikbo::bmm_impl
