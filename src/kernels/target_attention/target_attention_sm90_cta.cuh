// SPDX-License-Identifier: Apache-2.0
// What every role of target_attention_sm90 shares: barriers, the walk over tiles, rows of a user.
#pragma once

#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/target_attention/target_attention_sm90_traits.cuh"

namespace ikbo::target_attention_impl {

// Position in a ring; `phase` flips at each lap.
template <int kSize>
struct RingPosition {
  int slot = 0;
  int phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSize) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// Keeps what is computed from the value where it stands: hoisted out of the loop over tiles, the
// addresses of a whole tile would fill the registers.
__device__ __forceinline__ int computed_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <typename Traits>
struct Sm90Cta {
  using Element = typename Traits::Element;
  using Ring = RingPosition<Traits::kStages>;
  using QueryRing = RingPosition<Traits::kQueryBuffers>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kKeyBlock = Traits::kKeyBlock;

  const Sm90Params& params;
  typename Traits::SharedStorage& shared;
  std::uint32_t s_base;  // the address of `shared`, made once: making it takes dozens of cycles

  template <typename T>
  __device__ __forceinline__ std::uint32_t address(const T& s_object) const {
    return s_base + static_cast<std::uint32_t>(reinterpret_cast<const char*>(&s_object) -
                                               reinterpret_cast<const char*>(&shared));
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < Traits::kStages; ++s) {
      device::mbarrier_init(address(shared.full_k[s]), 1);
      device::mbarrier_init(address(shared.full_v[s]), 1);
      device::mbarrier_init(address(shared.loaded_v[s]), 1);
      device::mbarrier_init(address(shared.empty_k[s]), kConsumers * (kThreads / 32));
      device::mbarrier_init(address(shared.empty_v[s]), kConsumers * (kThreads / 32));
    }
    for (int c = 0; c < kConsumers; ++c) {
      for (int s = 0; s < Traits::kQueryBuffers; ++s) {
        device::mbarrier_init(address(shared.full_q[c][s]), 1);
        device::mbarrier_init(address(shared.staged[c][s]), kThreads);
        device::mbarrier_init(address(shared.empty_q[c][s]), 32);
      }
    }
    device::mbarrier_init_fence();
  }

  struct TileAt {
    Tile tile;
    int kv_head;
  };
  // Walks over the tiles of a CTA, every gridDim.x-th one of all kv heads' tiles. The next one is
  // asked for while the current one is worked on.
  class TileCursor {
   public:
    __device__ __forceinline__ explicit TileCursor(const Sm90Args& args)
        : args_(args),
          tiles_of_head_(*args.num_tiles),
          index_(static_cast<int>(blockIdx.x)),
          end_(tiles_of_head_ * args.num_kv_heads) {
      fetch();
    }
    __device__ __forceinline__ bool take(TileAt& at) {
      if (index_ >= end_) return false;
      at = next_;
      index_ += static_cast<int>(gridDim.x);
      fetch();
      return true;
    }

   private:
    __device__ __forceinline__ void fetch() {
      if (index_ >= end_) return;
      next_.kv_head = index_ / tiles_of_head_;
      next_.tile = args_.tiles[index_ - next_.kv_head * tiles_of_head_];
    }

    const Sm90Args& args_;
    int tiles_of_head_;
    int index_;
    int end_;
    TileAt next_{};
  };

  __device__ __forceinline__ static int blocks_of(const Tile& tile) {
    return (tile.num_keys + kKeyBlock - 1) / kKeyBlock;
  }
  __device__ __forceinline__ static int rows_of(const Tile& tile, int consumer) {
    return min(max(tile.num_rows - consumer * kRowsOfConsumer, 0), kRowsOfConsumer);
  }
  template <int kSize>
  __device__ __forceinline__ void wait_for(const std::uint64_t (&full)[kSize],
                                           const RingPosition<kSize>& ring) const {
    device::mbarrier_wait(address(full[ring.slot]), ring.phase);
  }
  // One arrival per warp.
  template <int kSize>
  __device__ __forceinline__ void release(const std::uint64_t (&empty)[kSize],
                                          RingPosition<kSize>& ring, int thread) const {
    if (thread % 32 == 0) device::mbarrier_arrive(address(empty[ring.slot]));
    __syncwarp();
    ring.advance();
  }

  // Where a row of a user lies.
  struct Row {
    int cand;
    int query;
    int head;
  };
  __device__ __forceinline__ Row row_at(const TileAt& at, int row) const {
    const Sm90Args& a = params.args;
    const int above = a.divide_by_group(row);
    const int cand = a.divide_by_queries(above);
    return {a.grouped_cands[at.tile.first_cand + cand], above - cand * a.num_queries,
            at.kv_head * a.group + row - above * a.group};
  }

  // The vector `vector` of a row in a tile of Q, or of the output that takes its place.
  __device__ __forceinline__ static unsigned vector_offset(unsigned row, unsigned vector) {
    return vector / 8 * Traits::kQueryChunkBytes + row * Traits::kRowBytes +
           ((vector % 8 ^ row % 8) << 4);
  }
};

}  // namespace ikbo::target_attention_impl
