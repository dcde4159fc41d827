// SPDX-License-Identifier: Apache-2.0
// Arguments, tile sizes and shared memory of target_attention_sm90.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "kernels/device/fast_divide.cuh"
#include "kernels/target_attention/target_attention_tiles.cuh"

namespace ikbo::target_attention_impl {

struct Sm90Args {
  // Written by the grouping kernel; where each CTA groups for itself, for the merging one.
  std::int32_t* num_tiles;
  Tile* tiles;
  std::int32_t* grouped_cands;
  bool groups_in_each_cta;
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;
  int rows_of_candidate;
  Histories histories;
  int max_tiles;
  int num_splits;
  const void* q;
  void* out;
  float* lse;
  float* partial_out;  // nullptr: keys are not split
  float* partial_lse;
  std::int64_t stride_q[3];  // candidate, query, head; elements
  int num_queries;
  int num_heads;
  int num_kv_heads;
  int group;        // heads of a kv head
  int box_rows;     // 0: rows move one by one, but for
  bool moves_runs;  // a consumer's candidates that follow each other in the batch: in one box
  device::FastDivide divide_by_box;
  device::FastDivide divide_by_group;
  device::FastDivide divide_by_queries;
  device::FastDivide divide_by_kv_heads;
  int head_dim;
  float scale;       // of the logits
  float scale_log2;  // scale * log2(e)
};

// Where a row of a user lies.
struct Row {
  int cand;  // of the history's own rows: the user
  int query;
  int head;
};
// `cands`: the candidates, user by user.
template <typename Cand>
__device__ __forceinline__ Row row_at(const Sm90Args& a, const Cand* cands, const Tile& tile,
                                      int kv_head, int row) {
  const int above = a.divide_by_group(row);
  const int cand = a.divide_by_queries(above);
  return {static_cast<int>(cands[tile.first_cand + cand]), above - cand * a.num_queries,
          kv_head * a.group + row - above * a.group};
}

// The candidates by user, in a CTA's own shared memory.
struct GroupsOfCta {
  alignas(8) std::uint16_t cands[device::kMaxCandsOfCta];  // user by user
  std::uint16_t first_cands[device::kMaxUsersOfCta + 1];   // of each user
  std::uint16_t users[device::kMaxUsersOfCta];             // by falling count of keys
  int first_tiles[device::kMaxUsersOfCta];  // of the users in that order, not counting splits
  int num_keys[device::kMaxUsersOfCta];     // of each user: see Tile
  int num_tiles;
  std::uint64_t users_loaded;  // barrier
};

struct Sm90Params {
  CUtensorMap k;  // (d, s, kv head, history)
  CUtensorMap v;
  CUtensorMap q;  // (d, head, query, candidate), in boxes of box_rows rows or of a run
  CUtensorMap out;
  Sm90Args args;
};

// What self_target_attention has beside: the histories' own rows.
struct OwnArgs {
  HistoryRows rows;
  int num_levels;  // tiles of the longest history that there may be
  const void* q;
  void* out;
  float* lse;
  std::int64_t stride_q[3];  // user, query, head; elements
  int box_rows;              // 0: rows move one by one
  device::FastDivide divide_by_box;
};
struct Sm90SelfParams : Sm90Params {
  CUtensorMap q_user;  // (d, head, query, user), in boxes of box_rows rows
  CUtensorMap out_user;
  OwnArgs own;
};
// The same, and where tiles of the histories' own rows lie in the list.
struct SelfGroupsOfCta : GroupsOfCta {
  int lengths[device::kMaxUsersOfCta];  // of the histories
  // Causal: the first tile of each level, behind those of candidates. A level is the tiles of one
  // number, the last number first, of all users that have it: by falling count of keys.
  // Not causal: how many such tiles the users before have; a user's stand before those of its
  // candidates.
  int first_own_tiles[kMaxLevelsOfCta];
};

// What a consumer has to know of a tile; it comes with the tile's Q.
struct ConsumerTile {
  int num_keys;     // of the tile; 0: there are no more tiles
  int num_rows;     // of the consumer
  int partial;      // its first row's number among the partial results
  int keys_of_all;  // that no row's limit takes away; only self_target_attention reads it
};

template <typename ElementT, int kHeadDimT, bool kHasOwnRowsT = false>
struct Sm90Traits {
  using Element = ElementT;
  static constexpr bool kHasOwnRows = kHasOwnRowsT;  // self_target_attention
  using Params = std::conditional_t<kHasOwnRows, Sm90SelfParams, Sm90Params>;
  using Groups = std::conditional_t<kHasOwnRows, SelfGroupsOfCta, GroupsOfCta>;
  static constexpr int kHeadDim = kHeadDimT;
  static constexpr int kKeyBlock = key_block_of(kHeadDim);
  static constexpr int kConsumers = consumers_of(kHeadDim);
  static constexpr int kTileRows = tile_rows_of(kHeadDim);
  static constexpr int kQueryBuffers = kHeadDim <= 192 ? 2 : 1;  // of each consumer
  static constexpr int kStages = kHeadDim <= 64 ? 6 : 2;         // blocks of K, and of V
  static constexpr int kNumThreads = (kConsumers + 1) * kThreads;
  // Registers of a thread after they are shared out anew: no more than the launch has.
  static constexpr int kConsumerRegisters = kConsumers == 3                   ? 144
                                            : kHeadDim == 128 && !kHasOwnRows ? 224
                                                                              : 216;
  static constexpr int kProducerRegisters = kConsumers == 3                   ? 80
                                            : kHeadDim == 128 && !kHasOwnRows ? 56
                                                                              : 72;
  static constexpr int kLaunchRegisters = 65536 / kNumThreads / 8 * 8;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
                (kConsumers + 1) * kLaunchRegisters);

  // A tile of R rows lies in shared memory as column chunks of [R][64 d], 128-byte swizzle.
  static constexpr int kChunkColumns = 64;
  static constexpr int kRowBytes = kChunkColumns * 2;
  static constexpr int kChunks = (kHeadDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kBlockChunkBytes = kKeyBlock * kRowBytes;
  static constexpr int kBlockBytes = kChunks * kBlockChunkBytes;
  static constexpr int kQueryChunkBytes = kRowsOfConsumer * kRowBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kAlignment = 1024;  // of every chunk, for the swizzle
  static constexpr int kMaxSharedBytes = 232448;

  struct SharedStorage {
    alignas(kAlignment) unsigned char k[kStages][kBlockBytes];
    alignas(kAlignment) unsigned char v[kStages][kBlockBytes];
    alignas(kAlignment) unsigned char q[kConsumers][kQueryBuffers][kQueryBytes];
    Groups groups;
    const void* sources[kRowsOfConsumer];  // of the rows that are loaded
    void* targets[kRowsOfConsumer];        // of the rows that are stored
    float lse[kConsumers][kQueryBuffers][kRowsOfConsumer];
    int limits[kConsumers][kQueryBuffers][kRowsOfConsumer];  // keys of the tile that a row sees
    alignas(16) ConsumerTile tiles[kConsumers][kQueryBuffers];
    alignas(8) std::uint64_t full_k[kStages];
    std::uint64_t empty_k[kStages];
    std::uint64_t full_v[kStages];
    std::uint64_t loaded_v[kStages];  // a block whose last rows are to be cleared has arrived
    std::uint64_t empty_v[kStages];
    std::uint64_t full_q[kConsumers][kQueryBuffers];
    std::uint64_t empty_q[kConsumers][kQueryBuffers];
    std::uint64_t staged[kConsumers][kQueryBuffers];  // the output stands in the place of Q
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

}  // namespace ikbo::target_attention_impl
