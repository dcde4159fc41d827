// SPDX-License-Identifier: Apache-2.0
// What every role of target_attention_sm90 shares: barriers, the walk over tiles, rows of a user.
#pragma once

#include "kernels/device/cta_group_tiles.cuh"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ring_position.cuh"
#include "kernels/target_attention/target_attention_sm90_traits.cuh"

namespace ikbo::target_attention_impl {

// Keeps what is computed from the value where it stands: hoisted out of the loop over tiles, the
// addresses of a whole tile would fill the registers.
__device__ __forceinline__ int computed_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <typename Traits>
struct Sm90Cta {
  using Element = typename Traits::Element;
  using Ring = device::FixedRingPosition<Traits::kStages>;
  using QueryRing = device::FixedRingPosition<Traits::kQueryBuffers>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kKeyBlock = Traits::kKeyBlock;
  static constexpr int kConsumers = Traits::kConsumers;

  const typename Traits::Params& params;
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
        device::mbarrier_init(address(shared.full_q[c][s]), 32);
        device::mbarrier_init(address(shared.staged[c][s]), kThreads);
        device::mbarrier_init(address(shared.empty_q[c][s]), 32);
      }
    }
    device::mbarrier_init_fence();
  }

  struct TileAt {
    Tile tile;
    int number;
    int kv_head;
  };
  // Walks over the tiles of a CTA. All kv heads' tiles are dealt out to and fro: no CTA has all of
  // those with more keys. The next one is asked for while the current one is worked on.
  class TileCursor {
   public:
    __device__ __forceinline__ explicit TileCursor(const Sm90Cta& cta)
        : cta_(cta),
          end_(cta.params.args.max_tiles * cta.params.args.num_splits),
          index_(static_cast<int>(blockIdx.x)),
          step_(2 * static_cast<int>(gridDim.x - blockIdx.x) - 1) {
      const Sm90Args& args = cta.params.args;
      if (args.groups_in_each_cta) end_ = cta.shared.groups.num_tiles * args.num_splits;
      fetch();
      if (!args.groups_in_each_cta) end_ = *args.num_tiles * args.num_splits;
    }
    __device__ __forceinline__ bool take(TileAt& at) {
      if (next_.number >= end_) return false;
      at = next_;
      index_ += step_;
      step_ = 2 * static_cast<int>(gridDim.x) - step_;
      fetch();
      return true;
    }

   private:
    __device__ __forceinline__ void fetch() {
      const Sm90Args& args = cta_.params.args;
      next_.number = args.divide_by_kv_heads(index_);
      next_.kv_head = index_ - next_.number * args.num_kv_heads;
      if (next_.number >= end_) return;
      if (args.groups_in_each_cta) {
        const int tile = args.histories.divide_by_splits(next_.number);
        next_.tile = cta_.tile_of_cta(tile, next_.number - tile * args.num_splits);
      } else {
        next_.tile = args.tiles[next_.number];
      }
    }

    const Sm90Cta& cta_;
    int end_;  // of a list in global memory a bound, while its length comes with its first tile
    int index_;
    int step_;
    TileAt next_{};
  };

  // Of the tiles that this CTA has found itself.
  __device__ __forceinline__ Tile tile_of_cta(int tile, int split) const {
    const auto& groups = shared.groups;
    if constexpr (Traits::kHasOwnRows) {
      if (params.own.rows.is_causal && tile >= groups.first_own_tiles[0]) {
        return tile_of_level(tile);
      }
    }
    const int at = device::last_not_above(groups.first_tiles, params.args.num_users, tile);
    const int user = groups.users[at];
    int tile_of_user = tile - groups.first_tiles[at];
    if constexpr (Traits::kHasOwnRows) {
      const HistoryRows& own = params.own.rows;
      const int length = groups.lengths[user];
      const int own_tiles = own.is_causal ? 0 : own.tiles_of(length);
      if (tile_of_user < own_tiles) {
        return own.tile_of(params.args.histories, user, length, tile_of_user);
      }
      tile_of_user -= own_tiles;
    }
    const int first_cand = groups.first_cands[user];
    const int first_row = tile_of_user * Traits::kTileRows;
    const int rows = (groups.first_cands[user + 1] - first_cand) * params.args.rows_of_candidate;
    return params.args.histories.tile_of({.user = user,
                                          .first_cand = first_cand,
                                          .first_row = first_row,
                                          .num_rows = min(rows - first_row, Traits::kTileRows)},
                                         groups.num_keys[user], split);
  }

  // Of causal rows, which lie behind those of candidates.
  __device__ __forceinline__ Tile tile_of_level(int tile) const {
    const auto& groups = shared.groups;
    const OwnArgs& own = params.own;
    const int level = device::last_not_above(groups.first_own_tiles, own.num_levels, tile);
    const int user = groups.users[tile - groups.first_own_tiles[level]];
    return own.rows.tile_of(params.args.histories, user, groups.lengths[user],
                            own.num_levels - 1 - level);
  }

  // Whether keys are split: with the histories' own rows there are tiles enough.
  __device__ __forceinline__ bool is_partial() const {
    return !Traits::kHasOwnRows && params.args.partial_out != nullptr;
  }
  // Whether a tile's rows are the history's own.
  __device__ __forceinline__ static bool is_own(const Tile& tile) {
    return Traits::kHasOwnRows && tile.rows_of == RowsOf::kHistory;
  }
  __device__ __forceinline__ static int blocks_of(const Tile& tile) {
    return (tile.num_keys + kKeyBlock - 1) / kKeyBlock;
  }
  __device__ __forceinline__ static int rows_of(const Tile& tile, int consumer) {
    return min(max(tile.num_rows - consumer * kRowsOfConsumer, 0), kRowsOfConsumer);
  }
  template <int kSize>
  __device__ __forceinline__ void wait_for(const std::uint64_t (&full)[kSize],
                                           const device::FixedRingPosition<kSize>& ring) const {
    device::mbarrier_wait(address(full[ring.slot]), ring.phase);
  }
  template <int kSize>
  __device__ __forceinline__ bool has(const std::uint64_t (&full)[kSize],
                                      const device::FixedRingPosition<kSize>& ring) const {
    return device::mbarrier_test(address(full[ring.slot]), ring.phase);
  }
  // One arrival per warp.
  template <int kSize>
  __device__ __forceinline__ void release(const std::uint64_t (&empty)[kSize],
                                          device::FixedRingPosition<kSize>& ring,
                                          int thread) const {
    if (thread % 32 == 0) device::mbarrier_arrive(address(empty[ring.slot]));
    __syncwarp();
    ring.advance();
  }

  __device__ __forceinline__ Row row_at(const TileAt& at, int row) const {
    const Sm90Args& a = params.args;
    if (is_own(at.tile)) {
      const int query = a.divide_by_group(row);
      return {at.tile.history, query, at.kv_head * a.group + row - query * a.group};
    }
    return a.groups_in_each_cta
               ? target_attention_impl::row_at(a, shared.groups.cands, at.tile, at.kv_head, row)
               : target_attention_impl::row_at(a, a.grouped_cands, at.tile, at.kv_head, row);
  }

  // The vector `vector` of a row in a tile of Q, or of the output that takes its place.
  __device__ __forceinline__ static unsigned vector_offset(unsigned row, unsigned vector) {
    return vector / 8 * Traits::kQueryChunkBytes + row * Traits::kRowBytes +
           ((vector % 8 ^ row % 8) << 4);
  }
};

}  // namespace ikbo::target_attention_impl
