// SPDX-License-Identifier: Apache-2.0
// Arguments and tile sizes of bmm_sm90.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/bmm/bmm_layout.h"
#include "kernels/device/fast_divide.cuh"

namespace ikbo::bmm_impl {

// A tensor that CTAs ask L2 for, a slice each.
struct Ahead {
  const void* data;
  std::int64_t bytes;  // 0: it has gaps
};

struct Sm90Args {
  // Written by the kernel ahead: whether candidates are sorted by user, else their list. Where each
  // CTA groups for itself and its share does not fit into its shared memory, all CTAs write the
  // same.
  std::int32_t* is_sorted;
  std::int32_t* grouped_cands;
  bool groups_in_each_cta;
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;
  Ahead a_ahead;
  Ahead b_ahead;
  const void* b_cand;
  void* out;
  std::int64_t stride_b_b;
  std::int64_t stride_b_inner;  // of the dimension of b_cand that is not contiguous
  int p;
  int r;
  int n;
  device::FastDivide divide_by_n;
  device::FastDivide divide_by_ctas;
  int grain;  // columns: tiles begin and end at multiples of it, or where their user does
  int num_grains;
  int padding;  // columns that the last grain lacks
  device::FastDivide divide_by_grains;
  int num_tiles_p;
  int num_blocks;  // of R
  int last_steps;  // steps of 16 in the last of them
  bool streams_user;
  int user_slots;
  int slot_blocks;  // of R, in a slot of the user's matrix
  int stages;
  int ring_stages;  // where the user's matrix is streamed, each consumer has a ring of its own
  BmmFeed feed;
  BmmStore store;
  int box_columns;  // of b_cand and out; kTma alone
  int row_columns;  // side by side in a row of a stage, where N is contiguous
};

struct Sm90Params {
  CUtensorMap a;    // (r, p, user) or (p, r, user)
  CUtensorMap b;    // (r, n, candidate) or (n, r, candidate); BmmFeed::kTma alone
  CUtensorMap out;  // (64 or N elements, row of so many, candidate); BmmStore::kTma alone
  Sm90Args args;
};

template <typename ElementT, int kTilePT, BmmInner kInnerAT, BmmInner kInnerBT>
struct Sm90Traits {
  using Element = ElementT;
  static constexpr int kTileP = kTilePT;
  static constexpr BmmInner kInnerA = kInnerAT;
  static constexpr BmmInner kInnerB = kInnerBT;
  static constexpr int kNumThreads = (kConsumers + 1) * kThreads;
  static constexpr int kAlignment = 1024;  // of every operand tile, for the swizzle

  // A block of R of the user's matrix: [kTileP][64 r], or column chunks of [64 r][64 p].
  static constexpr int kUserBlockBytes = user_bytes(kTileP, 1);
  static constexpr int kChunkBytes = kBlockR * 64 * 2;

  // Registers of a thread after they are shared out anew: no more than the launch has.
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kLaunchRegisters = 65536 / kNumThreads / 8 * 8;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
                (kConsumers + 1) * kLaunchRegisters);
};

}  // namespace ikbo::bmm_impl
