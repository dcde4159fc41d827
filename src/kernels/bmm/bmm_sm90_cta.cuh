// SPDX-License-Identifier: Apache-2.0
// What every role of bmm_sm90 shares: where things lie in shared memory, barriers, the walk over
// tiles.
#pragma once

#include "kernels/bmm/bmm_sm90_traits.cuh"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ring_position.cuh"

namespace ikbo::bmm_impl {

using device::RingPosition;

// Candidates user by user; in shared memory a CTA's own alone, by their numbers among all.
struct CandList {
  const std::int32_t* cands;  // nullptr: the batch is such a list
  const std::int32_t* users;  // of `cands`; nullptr: each is to be looked up
  int end;                    // nothing is to be read from here on
};

template <typename Traits>
struct Sm90Cta {
  const Sm90Params& params;
  std::uint32_t s_base;
  CandList list;

  // Shared memory: user matrices, stages, each consumer's staging, barriers, the CTA's list.
  __device__ __forceinline__ std::uint32_t user_matrix(int slot) const {
    return s_base + slot * params.args.slot_blocks * Traits::kUserBlockBytes;
  }
  __device__ __forceinline__ std::uint32_t stage(int slot) const {
    return user_matrix(params.args.user_slots) + slot * kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t staging(int consumer, int buffer) const {
    return stage(params.args.stages) + (consumer * kStagingBuffers + buffer) * kStagingBytes;
  }
  __device__ __forceinline__ std::uint32_t barrier(int index) const {
    return staging(kConsumers, 0) + index * static_cast<int>(sizeof(std::uint64_t));
  }
  __device__ __forceinline__ std::uint32_t full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ std::uint32_t empty(int slot) const {
    return barrier(kMaxStages + slot);
  }
  __device__ __forceinline__ std::uint32_t full_user(int slot) const {
    return barrier(2 * kMaxStages + slot);
  }
  __device__ __forceinline__ std::uint32_t empty_user(int slot) const {
    return barrier(2 * kMaxStages + kMaxUserSlots + slot);
  }
  __device__ __forceinline__ std::uint32_t turn(int consumer) const {
    return barrier(2 * kMaxStages + 2 * kMaxUserSlots + consumer);
  }
  __device__ __forceinline__ std::uint32_t full_tile(int slot) const {
    return barrier(2 * kMaxStages + 2 * kMaxUserSlots + kConsumers + slot);
  }
  __device__ __forceinline__ std::uint32_t empty_tile(int slot) const {
    return barrier(2 * kMaxStages + 2 * kMaxUserSlots + kConsumers + kTileSlots + slot);
  }
  __device__ __forceinline__ std::uint32_t own_list() const {
    return barrier(kBarrierBytes / static_cast<int>(sizeof(std::uint64_t)));
  }

  // An AnnouncedTile: the list begins with them.
  __device__ __forceinline__ std::uint32_t announced(int slot) const {
    return own_list() + slot * static_cast<int>(sizeof(AnnouncedTile));
  }

  __device__ __forceinline__ bool is_async() const { return params.args.feed == BmmFeed::kAsync; }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = kThreads / 32;
    for (int s = 0; s < params.args.stages; ++s) {
      device::mbarrier_init(full(s), is_async() ? kThreads : 1);
      device::mbarrier_init(empty(s), kWarps);
    }
    for (int c = 0; c < kConsumers; ++c) device::mbarrier_init(turn(c), kWarps);
    for (int s = 0; s < kTileSlots; ++s) {
      device::mbarrier_init(full_tile(s), 1);
      device::mbarrier_init(empty_tile(s), kConsumers * kWarps);
    }
    for (int s = 0; s < params.args.user_slots; ++s) {
      device::mbarrier_init(full_user(s), 1);
      device::mbarrier_init(empty_user(s), kConsumers * kWarps);
    }
    device::mbarrier_init_fence();
  }

  // A CTA's share of the columns of all tiles of P: neighbours, those of the first tile of P first.
  struct Share {
    int columns;
    int tile_p;  // of the first one
    int column;
  };
  __device__ __forceinline__ static Share share_of_cta(const Sm90Args& args) {
    const int all = args.num_grains * args.num_tiles_p;
    const int cta = static_cast<int>(blockIdx.x);
    const int least = args.divide_by_ctas(all);
    const int more = all - least * static_cast<int>(gridDim.x);  // CTAs that have one more
    const int count = least + (cta < more ? 1 : 0);
    if (count == 0) return {};
    const int begin = least * cta + min(cta, more);
    const int tile_p = args.divide_by_grains(begin);
    return {count * args.grain, tile_p, (begin - tile_p * args.num_grains) * args.grain};
  }

  __device__ __forceinline__ int cand_at(int position) const {
    return list.cands == nullptr ? position : list.cands[position];
  }

  struct TileAt {
    Tile tile;
    int tile_p;
    bool is_new_user;  // or a new tile of P
    bool ends_user;    // the last tile with its matrix
  };
  struct Column {
    int cand;
    int n;
  };
  // Where a column of the tile, below its num_columns, lies.
  __device__ __forceinline__ Column column_at(const Tile& tile, int column) const {
    const int of_first = tile.first_column + column;
    const int position = params.args.divide_by_n(of_first);
    return {cand_at(tile.first_cand + position), of_first - position * params.args.n};
  }
};

}  // namespace ikbo::bmm_impl
