// SPDX-License-Identifier: Apache-2.0
// What every role of bmm_sm90 shares: where things lie in shared memory, barriers, the walk over
// tiles.
#pragma once

#include "kernels/bmm/bmm_sm90_traits.cuh"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ring_position.cuh"

namespace ikbo::bmm_impl {

using device::RingPosition;

// Tiles and their candidates, by their numbers among all; in shared memory a CTA's own alone.
struct TileList {
  const Tile* tiles;
  const std::int32_t* cands;  // user by user
  int num_tiles;              // of all CTAs
};

template <typename Traits>
struct Sm90Cta {
  const Sm90Params& params;
  std::uint32_t s_base;
  TileList list;

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
  __device__ __forceinline__ std::uint32_t own_list() const {
    return barrier(kBarrierBytes / static_cast<int>(sizeof(std::uint64_t)));
  }

  __device__ __forceinline__ bool is_async() const { return params.args.feed == BmmFeed::kAsync; }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = kThreads / 32;
    for (int s = 0; s < params.args.stages; ++s) {
      device::mbarrier_init(full(s), is_async() ? kThreads : 1);
      device::mbarrier_init(empty(s), kWarps);
    }
    for (int c = 0; c < kConsumers; ++c) device::mbarrier_init(turn(c), kWarps);
    for (int s = 0; s < params.args.user_slots; ++s) {
      device::mbarrier_init(full_user(s), 1);
      device::mbarrier_init(empty_user(s), kConsumers * kWarps);
    }
    device::mbarrier_init_fence();
  }

  // A CTA's share of all tiles: neighbours, those of the first tile of P first.
  struct Share {
    int count;
    int tile_p;  // of the first one
    int index;
  };
  __device__ __forceinline__ static Share share_of_cta(int num_tiles, int num_tiles_p,
                                                       const device::FastDivide& divide_by_ctas) {
    const int all = num_tiles * num_tiles_p;
    const int cta = static_cast<int>(blockIdx.x);
    const int least = divide_by_ctas(all);
    const int more = all - least * static_cast<int>(gridDim.x);  // CTAs that have one more
    const int count = least + (cta < more ? 1 : 0);
    if (count == 0) return {};
    const int begin = least * cta + min(cta, more);
    const int tile_p = begin / num_tiles;
    return {count, tile_p, begin - tile_p * num_tiles};
  }

  struct TileAt {
    Tile tile;
    int tile_p;
    int consumer;
    bool is_new_user;  // or a new tile of P
  };
  // Walks over a CTA's share: most neighbours have the same user. The next tile is asked for while
  // the current one is worked on.
  class TileCursor {
   public:
    __device__ __forceinline__ explicit TileCursor(const Sm90Cta& cta)
        : tiles_(cta.list.tiles), num_tiles_(cta.list.num_tiles) {
      const Sm90Args& args = cta.params.args;
      const Share share = share_of_cta(num_tiles_, args.num_tiles_p, args.divide_by_ctas);
      left_ = share.count;
      if (left_ == 0) return;
      tile_p_ = share.tile_p;
      index_ = share.index;
      next_ = tiles_[index_];
    }
    __device__ __forceinline__ bool take(TileAt& at) {
      if (left_ == 0) return false;
      at.is_new_user = next_.user != user_ || index_ == 0;
      at.tile = next_;
      at.tile_p = tile_p_;
      at.consumer = consumer_;
      user_ = next_.user;
      consumer_ ^= 1;
      --left_;
      if (++index_ == num_tiles_) {
        index_ = 0;
        ++tile_p_;
      }
      if (left_ > 0) next_ = tiles_[index_];
      return true;
    }
    // Whether the tile that was taken last is the last one with its matrix.
    __device__ __forceinline__ bool ends_user() const {
      return left_ == 0 || index_ == 0 || next_.user != user_;
    }

   private:
    const Tile* tiles_;
    int num_tiles_;
    std::int64_t left_;
    int tile_p_ = 0;
    int index_ = 0;
    int user_ = -1;
    int consumer_ = 0;
    Tile next_{};
  };

  struct Column {
    int cand;
    int n;
  };
  // Where a column of the tile, below its num_columns, lies.
  __device__ __forceinline__ Column column_at(const Tile& tile, int column) const {
    const int of_user = tile.first_column + column;
    const int position = params.args.divide_by_n(of_user);
    return {list.cands[tile.first_cand + position], of_user - position * params.args.n};
  }
};

}  // namespace ikbo::bmm_impl
