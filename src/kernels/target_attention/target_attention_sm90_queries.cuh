// SPDX-License-Identifier: Apache-2.0
// The loader of Q.
#pragma once

#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_rows.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Queries : Sm90Rows<Traits> {
  using Rows = Sm90Rows<Traits>;
  using Box = typename Rows::Box;
  using Element = typename Rows::Element;
  using LaneVectors = typename Rows::LaneVectors;
  using Operands = typename Rows::Operands;
  using QueryRing = typename Rows::QueryRing;
  using TileAt = typename Rows::TileAt;
  using TileCursor = typename Rows::TileCursor;
  using Rows::address;
  using Rows::blocks_of;
  using Rows::box_of_lane;
  using Rows::boxes_of;
  using Rows::find_rows;
  using Rows::first_row_of;
  using Rows::has_boxes;
  using Rows::is_run;
  using Rows::kConsumers;
  using Rows::kVectorsOfRow;
  using Rows::operands_of;
  using Rows::params;
  using Rows::partial_row;
  using Rows::row_at;
  using Rows::rows_of;
  using Rows::shared;
  using Rows::vectors_of;

  // What the consumer has to know; an arrival at full_q follows.
  __device__ __forceinline__ void announce(const TileAt& at, int consumer, int slot,
                                           int lane) const {
    const Sm90Args& a = params.args;
    const int rows = rows_of(at.tile, consumer);
    int keys_of_all = a.histories.cand_lengths == nullptr ? at.tile.num_keys : 0;
    if constexpr (Traits::kHasOwnRows) {
      if (this->is_own(at.tile)) keys_of_all = limit_own_rows(at, consumer, slot, lane);
    }
    if (!this->is_own(at.tile) && a.histories.cand_lengths != nullptr) {
#pragma unroll
      for (int row = lane; row < kRowsOfConsumer; row += 32) {
        if (row >= rows) continue;
        const int cand = row_at(at, first_row_of(at, consumer) + row).cand;
        shared.limits[consumer][slot][row] =
            min(a.histories.cand_lengths[cand] - at.tile.keys_before, at.tile.num_keys);
      }
    }
    if (lane == 0) {
      shared.tiles[consumer][slot] = {.num_keys = at.tile.num_keys,
                                      .num_rows = rows,
                                      .partial = partial_row(at, consumer),
                                      .keys_of_all = keys_of_all};
    }
  }
  // Causal rows see no later key; rows of a box at or past the user's length, whose queries may be
  // NaN, see none. Returns how many keys all rows see.
  __device__ __forceinline__ int limit_own_rows(const TileAt& at, int consumer, int slot,
                                                int lane) const {
    const Operands operands = operands_of(at.tile);
    const int rows = rows_of(at.tile, consumer);
    const int first_row = first_row_of(at, consumer);
    const bool is_causal = params.own.rows.is_causal;
    const auto limit_of = [&](int row) {
      return is_causal ? params.args.divide_by_group(first_row + row) + 1 : at.tile.num_keys;
    };
    for (int row = lane; row < kRowsOfConsumer; row += 32) {
      shared.limits[consumer][slot][row] = row < rows ? limit_of(row) : 0;
    }
    const bool has_other_rows =
        operands.box_rows > 0 && boxes_of(at, consumer) * operands.box_rows > rows;
    return has_other_rows ? 0 : limit_of(0);
  }
  __device__ __forceinline__ void announce_end(const QueryRing (&rings)[kConsumers],
                                               int lane) const {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      device::mbarrier_wait(address(shared.empty_q[c][rings[c].slot]), rings[c].phase ^ 1);
      if (lane == 0) shared.tiles[c][rings[c].slot] = {};
      device::mbarrier_arrive(address(shared.full_q[c][rings[c].slot]));
    }
  }

  // Calls `load(at, consumer, ring)` for the Q of each consumer, tile by tile.
  template <typename Load>
  __device__ __forceinline__ void load_queries(int lane, Load&& load) const {
    QueryRing rings[kConsumers];
    TileCursor cursor(*this);
    for (TileAt at; cursor.take(at);) {
      if (blocks_of(at.tile) == 0) continue;
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        load(at, c, rings[c]);
        rings[c].advance();
      }
    }
    announce_end(rings, lane);
  }
  __device__ __forceinline__ void load_queries(int lane) const {
    if constexpr (Traits::kHasOwnRows) {
      load_queries(lane, [&](const TileAt& at, int consumer, const QueryRing& ring) {
        if (has_boxes(at.tile)) {
          load_query_boxes(at, consumer, ring, lane);
        } else {
          load_query_rows(at, consumer, ring, lane);
        }
      });
    } else if (has_boxes({})) {
      load_queries(lane, [&](const TileAt& at, int consumer, const QueryRing& ring) {
        load_query_boxes(at, consumer, ring, lane);
      });
    } else {
      load_queries(lane, [&](const TileAt& at, int consumer, const QueryRing& ring) {
        load_query_rows(at, consumer, ring, lane);
      });
    }
  }

  __device__ __forceinline__ void load_query_boxes(const TileAt& at, int consumer,
                                                   const QueryRing& ring, int lane) const {
    const Operands operands = operands_of(at.tile);
    const int boxes = boxes_of(at, consumer);
    Box box{};
    if (lane < boxes) box = box_of_lane(at, consumer, lane);
    const int slot = ring.slot;
    device::mbarrier_wait(address(shared.empty_q[consumer][slot]), ring.phase ^ 1);
    announce(at, consumer, slot, lane);
    __syncwarp();
    const std::uint32_t full = address(shared.full_q[consumer][slot]);
    if (lane == 0) {
      device::mbarrier_arrive_expect_bytes(
          full, boxes * operands.box_rows * Traits::kRowBytes * Traits::kChunks);
    } else {
      device::mbarrier_arrive(full);
    }
    __syncwarp();
    if (lane < boxes) {
#pragma unroll 1
      for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
        device::tma_load_4d(address(shared.q[consumer][slot]) + chunk * Traits::kQueryChunkBytes +
                                box.first_row * Traits::kRowBytes,
                            operands.q_map, address(shared.full_q[consumer][slot]),
                            chunk * Traits::kChunkColumns, box.at.head, box.at.query, box.at.cand);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_query_rows(const TileAt& at, int consumer,
                                                  const QueryRing& ring, int lane) const {
    if (is_run(at, consumer)) return load_query_run(at, consumer, ring, lane);
    const bool has_rows = rows_of(at.tile, consumer) > 0;
    if (has_rows) {
      const Operands operands = operands_of(at.tile);
      find_rows(at, consumer, lane, [&](int half, const Row& row) {
        shared.sources[lane + 32 * half] =
            static_cast<const Element*>(operands.q) + row.cand * operands.stride_q[0] +
            row.query * operands.stride_q[1] + row.head * operands.stride_q[2];
      });
      __syncwarp();
    }
    const int slot = ring.slot;
    device::mbarrier_wait(address(shared.empty_q[consumer][slot]), ring.phase ^ 1);
    announce(at, consumer, slot, lane);
    if (has_rows) {
      load_rows(address(shared.q[consumer][slot]), rows_of(at.tile, consumer), lane);
      device::copy_async_wait<0>();
      device::fence_smem_to_async();
    }
    __syncwarp();
    device::mbarrier_arrive(address(shared.full_q[consumer][slot]));
  }

  // Behind its last row there are those of candidates of another user, or zeros: rows that nobody
  // reads.
  __device__ __forceinline__ void load_query_run(const TileAt& at, int consumer,
                                                 const QueryRing& ring, int lane) const {
    const int slot = ring.slot;
    const int first_cand = row_at(at, first_row_of(at, consumer)).cand;
    device::mbarrier_wait(address(shared.empty_q[consumer][slot]), ring.phase ^ 1);
    announce(at, consumer, slot, lane);
    __syncwarp();
    const std::uint32_t full = address(shared.full_q[consumer][slot]);
    if (lane > 0) return device::mbarrier_arrive(full);
    device::mbarrier_arrive_expect_bytes(full, Traits::kQueryBytes);
#pragma unroll 1
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      device::tma_load_4d(address(shared.q[consumer][slot]) + chunk * Traits::kQueryChunkBytes,
                          &params.q, full, chunk * Traits::kChunkColumns,
                          at.kv_head * params.args.group, 0, first_cand);
    }
  }

  // Rows from `rows` on are zeros. NOTE: read from the first one's place by all CTAs at once, they
  // would wait for each other.
  __device__ __forceinline__ void load_rows(std::uint32_t s_tile, int rows, int lane) const {
    const LaneVectors mine = vectors_of(lane);
    if (mine.vector >= kVectorsOfRow) return;
    const bool counts = static_cast<int>(mine.vector) * 8 < params.args.head_dim;
    const unsigned column = counts ? mine.vector * 8 : 0;
#pragma unroll 1
    for (unsigned first = 0; first < kRowsOfConsumer; first += LaneVectors::kRows) {
      const Element* g_row[LaneVectors::kSteps];
#pragma unroll
      for (int s = 0; s < LaneVectors::kSteps; ++s) {
        g_row[s] = static_cast<const Element*>(shared.sources[first + mine.row(s)]) + column;
      }
#pragma unroll
      for (int s = 0; s < LaneVectors::kSteps; ++s) {
        const bool is_row = static_cast<int>(first + mine.row(s)) < rows;
        device::copy_async<16>(s_tile + mine.offset_after(first, s), g_row[s],
                               counts && is_row ? 16 : 0);
      }
    }
    device::copy_async_commit();
  }
};

}  // namespace ikbo::target_attention_impl
