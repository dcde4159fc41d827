// SPDX-License-Identifier: Apache-2.0
// Arguments, tile sizes and shared memory of lce_sm90.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/lce/lce_layout.h"

namespace ikbo::lce_impl {

enum class Stage {
  kUser,       // writes user_partial
  kCandidate,  // adds the user's row of it
  kDual,       // k runs over the user's rows, then over the candidate's: no user_partial
};

// What the rows of one E tensor add to k.
struct Sm90Part {
  int num_blocks;  // ceil(K_i / 32)
  int last_steps;  // steps of 16 k in the last block, 1 or 2
};

struct Sm90Args {
  float4* user_partial;              // see lce_sm90_epilogue.cuh for the order; kUser, kCandidate
  const void* bias;                  // [M], kUser and kDual; may be nullptr
  const std::int32_t* cand_to_user;  // [B], kCandidate and kDual
  int m;
  int batch;         // U or B
  int num_slices;    // ceil(N / 64)
  int num_tiles_m;   // ceil(M / tile_m)
  int num_blocks_k;  // of all parts
  int num_parts;
  LceSplit split;
};

template <int kMaxParts>
struct Sm90Params {
  CUtensorMap e[kMaxParts];  // kDual: of the user, then of the candidate
  CUtensorMap w[2];          // kDual: likewise; the other stages have one
  CUtensorMap out;           // not kUser
  Sm90Part parts[kMaxParts];
  Sm90Args args;
};

template <typename ElementT, int kTileMT, int kConsumersT, Stage kStageT, int kMaxPartsT>
struct Sm90Traits {
  using Element = ElementT;
  using Params = Sm90Params<kMaxPartsT>;
  static constexpr int kTileM = kTileMT;
  static constexpr int kConsumers = kConsumersT;  // warpgroups that share the weight tile
  static constexpr Stage kStage = kStageT;
  static constexpr int kMaxParts = kMaxPartsT;
  static constexpr int kNumThreads = (kConsumers + 1) * kThreads;
  // Blocks of k whose multiplication is under way while the next is issued.
  static constexpr int kPending = 1;
  static constexpr int kTileEBytes = kBlockK * kSliceN * 2;
  static constexpr int kTileWBytes = kTileM * kBlockK * 2;
  static constexpr int kStageBytes = kConsumers * kTileEBytes + kTileWBytes;

  // A consumer's share of the user's partial: kFragments float4 a thread, of which as many as fit
  // beside the accumulators stay in registers and the first kInShared in shared memory.
  static constexpr int kFragments = kTileM / 8;
  static constexpr int kFreeRegisters = 216 - kTileM / 2;
  static constexpr int kFit = kFreeRegisters / 8 * 2;
  static constexpr int kInRegisters = kFit < kFragments ? kFit : kFragments;
  static constexpr int kInShared = kStage == Stage::kUser ? 0 : kFragments - kInRegisters;
  static constexpr int kPartialBytes = kInShared * kThreads * 16;
  static constexpr int kStagingBytes = kStage == Stage::kUser ? 0 : kTileM * kSliceN * 2;

  static constexpr int kMaxSharedBytes = 232448;
  static constexpr int kAlignment = 1024;  // of every tile, for the swizzles
  static constexpr int kBarrierBytes = 512;
  static constexpr int kStagesThatFit =
      (kMaxSharedBytes - kBarrierBytes - kConsumers * (kPartialBytes + kStagingBytes)) /
      kStageBytes;
  static constexpr int kNumStages = kStagesThatFit < 12 ? kStagesThatFit : 12;
  static_assert(kNumStages > kPending + 1);

  struct SharedStorage {
    alignas(kAlignment) unsigned char stages[kNumStages][kStageBytes];
    alignas(kAlignment) unsigned char staging[kConsumers][kStagingBytes > 0 ? kStagingBytes : 1];
    alignas(16) unsigned char partial[kConsumers][kPartialBytes > 0 ? kPartialBytes : 1];
    alignas(8) std::uint64_t full[kNumStages];
    std::uint64_t empty[kNumStages];
    std::uint64_t partial_full[kConsumers];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

}  // namespace ikbo::lce_impl
