// SPDX-License-Identifier: Apache-2.0
// The loaders of bmm_sm90: the user's matrix by the copy engine, columns of candidates by it or by
// asynchronous copies of the producer's threads.
#pragma once

#include "kernels/bmm/bmm_sm90_tiles.cuh"
#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/device/ptx_tma.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
struct Sm90Producer : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Column = typename Cta::Column;
  using TileAt = typename Cta::TileAt;
  using Cta::column_at;
  using Cta::empty;
  using Cta::full;
  using Cta::params;
  using Cta::stage;

  static constexpr int kRowsAtOnce = kThreads / 8;  // of 128 bytes, by all threads
  static constexpr int kCopies = kTileColumns / kRowsAtOnce;
  static_assert(kTileColumns == kBlockR);

  // By one thread.
  __device__ __forceinline__ void load_user(const TileAt& at, RingPosition& ring) const {
    const std::uint32_t barrier = this->full_user(ring.slot);
    device::mbarrier_wait(this->empty_user(ring.slot), ring.phase ^ 1);
    device::mbarrier_arrive_expect_bytes(barrier, params.args.num_blocks * Traits::kUserBlockBytes);
    const std::uint32_t s_matrix = this->user_matrix(ring.slot);
    for (int block = 0; block < params.args.num_blocks; ++block) {
      load_user_block(at, block, s_matrix + block * Traits::kUserBlockBytes, barrier);
    }
    ring.advance(params.args.user_slots);
  }
  __device__ __forceinline__ void load_user_block(const TileAt& at, int block,
                                                  std::uint32_t s_block,
                                                  std::uint32_t barrier) const {
    const int first_p = at.tile_p * Traits::kTileP;
    if constexpr (Traits::kInnerA == BmmInner::kSum) {
      device::tma_load_3d(s_block, &params.a, barrier, block * kBlockR, first_p, at.tile.user);
    } else {
      for (int chunk = 0; chunk < Traits::kTileP / 64; ++chunk) {
        device::tma_load_3d(s_block + chunk * Traits::kChunkBytes, &params.a, barrier,
                            first_p + chunk * 64, block * kBlockR, at.tile.user);
      }
    }
  }

  // By one warp: a lane loads the columns of one candidate.
  __device__ __forceinline__ void produce_boxes(int lane) const {
    const Sm90Args& args = params.args;
    const int box_columns = args.box_columns;
    const auto has_box = [&](const TileAt& at) { return lane * box_columns < at.tile.num_columns; };
    RingPosition ring;
    RingPosition user_ring;
    TileCursor<Traits> cursor(*this);
    TileAnnouncer<Traits> announcer(*this, lane);
    TileAt at{};
    Column column{};
    for (bool has_next = true; has_next;) {
      TileAt next{};
      Column next_column{};
      has_next = cursor.take(next);
      announcer.announce(has_next ? next : TileAt{});
      if (has_next && has_box(next)) next_column = column_at(next.tile, lane * box_columns);
      if (lane == 0 && at.is_new_user) load_user(at, user_ring);
      __syncwarp();
#pragma unroll 1
      for (int block = 0; at.tile.num_columns > 0 && block < args.num_blocks; ++block) {
        load_boxes(ring.slot, ring.phase, block, column, lane, has_box(at));
        ring.advance(args.stages);
      }
      at = next;
      column = next_column;
    }
  }

  // A block of R of a tile, by one warp.
  __device__ __forceinline__ void load_boxes(int slot, int phase, int block, const Column& column,
                                             int lane, bool has_box) const {
    const int boxes = __popc(__ballot_sync(~0u, has_box));
    const int box_bytes = params.args.box_columns * kBlockR * 2;
    const std::uint32_t barrier = full(slot);
    device::mbarrier_wait(empty(slot), phase ^ 1);
    if (lane == 0) device::mbarrier_arrive_expect_bytes(barrier, boxes * box_bytes);
    __syncwarp();
    if (has_box) {
      const std::uint32_t s_box = stage(slot) + lane * box_bytes;
      if constexpr (Traits::kInnerB == BmmInner::kSum) {
        device::tma_load_3d(s_box, &params.b, barrier, block * kBlockR, column.n, column.cand);
      } else {
        device::tma_load_3d(s_box, &params.b, barrier, column.n, block * kBlockR, column.cand);
      }
    }
    __syncwarp();
  }

  // By one warp, where the user's matrix is streamed: block after block of it, each with the same
  // block of two tiles of the user, one for each consumer.
  __device__ __forceinline__ void produce_pairs(int lane) const {
    const Sm90Args& args = params.args;
    const int first_column = lane * args.box_columns;
    RingPosition ring;  // of the first consumer's stages
    RingPosition second_ring;
    RingPosition user_ring;
    TileCursor<Traits> cursor(*this);
    TileAnnouncer<Traits> announcer(*this, lane);
    for (TileAt at; cursor.take(at);) {
      announcer.announce(at);
      TileAt second;
      const bool is_pair = !at.ends_user && cursor.take(second);
      if (is_pair) announcer.announce(second);
      const bool has_box = first_column < at.tile.num_columns;
      const bool has_second = is_pair && first_column < second.tile.num_columns;
      const Column column = has_box ? column_at(at.tile, first_column) : Column{};
      const Column second_column = has_second ? column_at(second.tile, first_column) : Column{};
#pragma unroll 1
      for (int block = 0; block < args.num_blocks; ++block) {
        device::mbarrier_wait(this->empty_user(user_ring.slot), user_ring.phase ^ 1);
        if (lane == 0) {
          const std::uint32_t barrier = this->full_user(user_ring.slot);
          device::mbarrier_arrive_expect_bytes(barrier, Traits::kUserBlockBytes);
          load_user_block(at, block, this->user_matrix(user_ring.slot), barrier);
        }
        user_ring.advance(args.user_slots);
        load_boxes(ring.slot, ring.phase, block, column, lane, has_box);
        ring.advance(args.ring_stages);
        if (!is_pair) continue;
        load_boxes(args.ring_stages + second_ring.slot, second_ring.phase, block, second_column,
                   lane, has_second);
        second_ring.advance(args.ring_stages);
      }
    }
    announcer.end();
  }

  // What a thread copies of a tile: vector thread % 8 of rows thread / 8 + i * kRowsAtOnce. A row
  // is a column of the tile (R contiguous), or a step of R, whose vectors lie in different
  // candidates.
  struct Sources {
    static constexpr int kCount = Traits::kInnerB == BmmInner::kSum ? kCopies : 1;
    const std::uint16_t* data[kCount];  // of the first block; nullptr: a column that is not there
  };
  __device__ __forceinline__ Sources find_sources(const TileAt& at, int thread) const {
    const Sm90Args& args = params.args;
    const auto* g_b = static_cast<const std::uint16_t*>(args.b_cand);
    Sources sources;
#pragma unroll
    for (int i = 0; i < Sources::kCount; ++i) {
      constexpr bool kIsSum = Traits::kInnerB == BmmInner::kSum;
      const int index = kIsSum ? thread / 8 + i * kRowsAtOnce : thread % 8 * 8;
      sources.data[i] = nullptr;
      if (index >= at.tile.num_columns) continue;
      const Column column = column_at(at.tile, index);
      const std::int64_t inner = kIsSum ? column.n * args.stride_b_inner + thread % 8 * 8
                                        : column.n + thread / 8 * args.stride_b_inner;
      sources.data[i] = g_b + column.cand * args.stride_b_b + inner;
    }
    return sources;
  }

  __device__ __forceinline__ void copy_block(const Sources& sources, std::uint32_t s_stage,
                                             int first_r, int thread) const {
    const Sm90Args& args = params.args;
    const int row = thread / 8;
    const int vector = thread % 8;
    const std::uint32_t s_first = s_stage + row * 128 + ((vector ^ row % 8) << 4);
    static_assert(kRowsAtOnce % 8 == 0);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const std::uint16_t* g_source;
      int bytes;
      if constexpr (Traits::kInnerB == BmmInner::kSum) {
        g_source = sources.data[i];
        bytes = g_source == nullptr ? 0 : min(max(args.r - first_r - vector * 8, 0), 8) * 2;
        g_source += first_r;
      } else {
        const int r = first_r + i * kRowsAtOnce;
        g_source = sources.data[0];
        bytes = g_source == nullptr || r + row >= args.r ? 0 : 16;
        g_source += r * args.stride_b_inner;
      }
      device::copy_async<16>(s_first + i * kRowsAtOnce * 128, bytes > 0 ? g_source : args.b_cand,
                             bytes);
    }
  }

  // By all threads of the producer.
  __device__ __forceinline__ void produce_copies(int thread) const {
    RingPosition ring;
    RingPosition user_ring;
    TileCursor<Traits> cursor(*this);
    TileAnnouncer<Traits> announcer(*this, thread);
    for (TileAt at; cursor.take(at);) {
      if (thread < 32) announcer.announce(at);
      const Sources sources = find_sources(at, thread);
      if (thread == 0 && at.is_new_user) load_user(at, user_ring);
      __syncwarp();
#pragma unroll 1
      for (int block = 0; block < params.args.num_blocks; ++block) {
        device::mbarrier_wait(empty(ring.slot), ring.phase ^ 1);
        copy_block(sources, stage(ring.slot), block * kBlockR, thread);
        device::copy_async_arrive(full(ring.slot));
        ring.advance(params.args.stages);
      }
    }
    if (thread < 32) announcer.end();
    device::copy_async_commit();
    device::copy_async_wait<0>();
  }
};

}  // namespace ikbo::bmm_impl
