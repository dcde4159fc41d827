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
            .unused = 0};
  }
};

}  // namespace ikbo::target_attention_impl
