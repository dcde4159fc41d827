// SPDX-License-Identifier: Apache-2.0
// The storer of the output.
#pragma once

#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_rows.cuh"
#include "kernels/target_attention/target_attention_sm90_softmax.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Outputs : Sm90Rows<Traits> {
  using Rows = Sm90Rows<Traits>;
  using Box = typename Rows::Box;
  using Element = typename Rows::Element;
  using LaneVectors = typename Rows::LaneVectors;
  using Operands = typename Rows::Operands;
  using QueryRing = typename Rows::QueryRing;
  using Softmax = OnlineSoftmax<Element, Traits::kKeyBlock>;
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
  using Rows::operands_of;
  using Rows::params;
  using Rows::partial_row;
  using Rows::row_at;
  using Rows::rows_of;
  using Rows::shared;
  using Rows::vectors_of;

  // Stores what the consumers leave in the place of Q. They store partial rows themselves.
  __device__ __forceinline__ void store_outputs(int lane) const {
    QueryRing rings[kConsumers];
    const bool is_partial = this->is_partial();
    TileCursor cursor(*this);
    for (TileAt at; cursor.take(at);) {
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const int rows = rows_of(at.tile, c);
        if (blocks_of(at.tile) == 0) {
          store_nothing(at, c, rows, lane);
          continue;
        }
        const int slot = rings[c].slot;
        if (rows > 0 && !is_partial) {
          store_tile(at, c, rings[c], lane);
        } else {
          device::mbarrier_wait(address(shared.staged[c][slot]), rings[c].phase);
          if (is_partial) store_partial_lse(partial_row(at, c), rows, shared.lse[c][slot], lane);
        }
        device::mbarrier_arrive(address(shared.empty_q[c][slot]));
        __syncwarp();
        rings[c].advance();
      }
    }
    device::tma_store_wait();
  }

  __device__ __forceinline__ void store_partial_lse(int first_row, int rows, const float* lse,
                                                    int lane) const {
    float* g_lse = params.args.partial_lse + first_row;
    for (int row = lane; row < rows; row += 32) g_lse[row] = lse[row];
  }

  // Where this lane's two rows of a consumer's tile go; the places of all rows of the output are
  // left in shared memory.
  __device__ __forceinline__ void find_targets(const TileAt& at, int consumer, int lane,
                                               float* (&g_lse)[2]) const {
    const Operands operands = operands_of(at.tile);
    find_rows(at, consumer, lane, [&](int half, const Row& row) {
      const Sm90Args& a = params.args;
      const std::int64_t first =
          static_cast<std::int64_t>(row.cand) * operands.num_queries * a.num_heads;
      shared.targets[lane + 32 * half] = static_cast<Element*>(operands.out) +
                                         (first + row.query * a.num_heads + row.head) * a.head_dim;
      g_lse[half] = operands.lse + first + row.head * operands.num_queries + row.query;
    });
    __syncwarp();
  }

  __device__ __forceinline__ void store_tile(const TileAt& at, int consumer, const QueryRing& ring,
                                             int lane) const {
    float* g_lse[2];
    find_targets(at, consumer, lane, g_lse);
    Box box{};
    const bool comes_in_boxes = has_boxes(at.tile);
    const bool has_box = comes_in_boxes && lane < boxes_of(at, consumer);
    if (has_box) box = box_of_lane(at, consumer, lane);
    device::mbarrier_wait(address(shared.staged[consumer][ring.slot]), ring.phase);
    // NOTE: here, not by the consumers, whose every cycle between two tiles counts.
    device::fence_smem_to_async();
    const std::uint32_t s_tile = address(shared.q[consumer][ring.slot]);
    const int rows = rows_of(at.tile, consumer);
    if (has_box) store_box(s_tile, box, operands_of(at.tile).out_map);
    if (rows == kRowsOfConsumer && is_run(at, consumer)) {
      box.at = row_at(at, first_row_of(at, consumer));
      if (lane == 0) store_box(s_tile, box, &params.out);
    } else if (!comes_in_boxes) {
      store_rows(s_tile, static_cast<unsigned>(rows), lane);
      // The copy engine may be the next to write here.
      if (Traits::kHasOwnRows) device::fence_smem_to_async();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane + 32 * half;
      if (row < rows) *g_lse[half] = shared.lse[consumer][ring.slot][row];
    }
    device::tma_store_wait_read();
  }

  __device__ __forceinline__ void store_box(std::uint32_t s_tile, const Box& box,
                                            const CUtensorMap* map) const {
#pragma unroll 1
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      device::tma_store_4d(
          map, s_tile + chunk * Traits::kQueryChunkBytes + box.first_row * Traits::kRowBytes,
          chunk * Traits::kChunkColumns, box.at.head, box.at.query, box.at.cand);
    }
    device::tma_store_commit();
  }

  // The first `rows` rows of a tile.
  __device__ __forceinline__ void store_rows(std::uint32_t s_tile, unsigned rows, int lane) const {
    const LaneVectors mine = vectors_of(lane);
    if (static_cast<int>(mine.vector) * 8 >= params.args.head_dim) return;
#pragma unroll 1
    for (unsigned first = 0; first < rows; first += LaneVectors::kRows) {
      uint4 value[LaneVectors::kSteps];
#pragma unroll
      for (int s = 0; s < LaneVectors::kSteps; ++s) {
        value[s] = device::load_shared(s_tile + mine.offset_after(first, s));
      }
#pragma unroll
      for (int s = 0; s < LaneVectors::kSteps; ++s) {
        if (first + mine.row(s) >= rows) continue;
        auto* g_row = static_cast<Element*>(shared.targets[first + mine.row(s)]);
        device::store_global(g_row + mine.vector * 8, value[s]);
      }
    }
  }

  // Zeros and a log-sum-exp of -inf: rows without a key. Of a partial result the latter will do.
  __device__ __forceinline__ void store_nothing(const TileAt& at, int consumer, int rows,
                                                int lane) const {
    if (rows == 0) return;
    const Sm90Args& a = params.args;
    if (this->is_partial()) {
      float* g_lse = a.partial_lse + partial_row(at, consumer);
      for (int row = lane; row < rows; row += 32) g_lse[row] = Softmax::kMinusInfinity;
      return;
    }
    float* g_lse[2];
    find_targets(at, consumer, lane, g_lse);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane + 32 * half < rows) *g_lse[half] = Softmax::kMinusInfinity;
    }
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      if (lane * 8 >= a.head_dim) continue;
      device::store_global(static_cast<Element*>(shared.targets[row]) + lane * 8,
                           make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
  }
};

}  // namespace ikbo::target_attention_impl
