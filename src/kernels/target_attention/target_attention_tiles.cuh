// SPDX-License-Identifier: Apache-2.0
// From users and their candidates to tiles.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups.cuh"
#include "kernels/device/fast_divide.cuh"
#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

struct Histories {
  const std::int32_t* user_lengths;  // may be nullptr, as the next two
  const std::int32_t* user_offsets;
  const std::int32_t* cand_lengths;
  int num_keys;  // S; packed: of all users
  int key_block;
  int num_splits;
  device::FastDivide divide_by_key_block;
  device::FastDivide divide_by_splits;

  // Whether users may differ in the keys that count for any of their candidates.
  __device__ __forceinline__ bool are_uneven() const {
    return user_lengths != nullptr || user_offsets != nullptr || cand_lengths != nullptr;
  }
  __device__ __forceinline__ int length_of(int user) const {
    if (user_offsets != nullptr) return user_offsets[user + 1] - user_offsets[user];
    return user_lengths != nullptr ? user_lengths[user] : num_keys;
  }
  // Rows of a user with a range of its `keys` that count for any of its candidates.
  __device__ __forceinline__ Tile tile_of(const device::UserRows& rows, int keys, int split) const {
    const bool is_packed = user_offsets != nullptr;
    const int blocks = divide_by_key_block(keys + key_block - 1);
    const int keys_of_range = divide_by_splits(blocks + num_splits - 1) * key_block;
    const int before = min(split * keys_of_range, keys);
    return {.history = is_packed ? 0 : rows.user,
            .first_key = before + (is_packed ? user_offsets[rows.user] : 0),
            .num_keys = min(keys - before, keys_of_range),
            .keys_before = before,
            .first_cand = rows.first_cand,
            .first_row = rows.first_row,
            .num_rows = rows.num_rows,
            .rows_of = RowsOf::kCandidates};
  }
};

// The queries of the histories themselves, cut into tiles of their own. Rows at or past a user's
// length are in none.
struct HistoryRows {
  int group;  // heads of a kv head
  bool is_causal;
  device::TileRows tile_rows;
  device::FastDivide divide_by_group;

  __device__ __forceinline__ int tiles_of(int length) const {
    return tile_rows.divide(length * group + tile_rows.count - 1);
  }
  // Tile number `tile` of a user's. Of causal rows, with the blocks of keys that any of them sees.
  __device__ __forceinline__ Tile tile_of(const Histories& histories, int user, int length,
                                          int tile) const {
    const int first_row = tile * tile_rows.count;
    const int num_rows = min(length * group - first_row, tile_rows.count);
    int keys = length;
    if (is_causal) {
      const int last_query = divide_by_group(first_row + num_rows - 1);
      keys = min((histories.divide_by_key_block(last_query) + 1) * histories.key_block, length);
    }
    return {.history = user,
            .first_key = 0,
            .num_keys = keys,
            .keys_before = 0,
            .first_cand = 0,
            .first_row = first_row,
            .num_rows = num_rows,
            .rows_of = RowsOf::kHistory};
  }
};

}  // namespace ikbo::target_attention_impl
