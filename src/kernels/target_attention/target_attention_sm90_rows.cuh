// SPDX-License-Identifier: Apache-2.0
// The loader of Q and the storer of the output: rows of any candidates of a user.
#pragma once

#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"
#include "kernels/target_attention/target_attention_sm90_softmax.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Rows : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Element = typename Traits::Element;
  using QueryRing = typename Cta::QueryRing;
  using Softmax = OnlineSoftmax<Element, Traits::kKeyBlock>;
  using TileAt = typename Cta::TileAt;
  using TileCursor = typename Cta::TileCursor;
  using Cta::address;
  using Cta::blocks_of;
  using Cta::kConsumers;
  using Cta::kHeadDim;
  using Cta::params;
  using Cta::row_at;
  using Cta::rows_of;
  using Cta::shared;
  using Cta::vector_offset;

  // Rows move between global and shared memory as vectors of 16 bytes: a few lanes take a row.
  static constexpr int kVectorsOfRow = kHeadDim / 8;
  static constexpr int kLanesOfRow = kVectorsOfRow > 16  ? 32
                                     : kVectorsOfRow > 8 ? 16
                                                         : kVectorsOfRow;
  static constexpr int kRowsAtOnce = 32 / kLanesOfRow;

  // This lane's vectors among a few rows of a tile that follow a multiple of their count.
  struct LaneVectors {
    static constexpr int kSteps = kRowsAtOnce > 1 ? 8 / kRowsAtOnce : 4;
    static constexpr unsigned kRows = kSteps * kRowsAtOnce;
    unsigned vector;
    unsigned first;           // row of the first step
    unsigned offset[kSteps];  // in the tile, after rows that are a multiple of 8

    __device__ __forceinline__ explicit LaneVectors(int lane)
        : vector(static_cast<unsigned>(lane) % kLanesOfRow),
          first(static_cast<unsigned>(lane) / kLanesOfRow) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) offset[s] = vector_offset(row(s), vector);
    }
    __device__ __forceinline__ unsigned row(int step) const {
      return first + static_cast<unsigned>(step * kRowsAtOnce);
    }
    __device__ __forceinline__ unsigned offset_after(unsigned rows, int step) const {
      return rows * Traits::kRowBytes + (offset[step] ^ rows % 8 << 4);
    }
  };

  // NOTE: where rows move in both ways, those of the one leave the other no registers for these.
  __device__ __forceinline__ static LaneVectors vectors_of(int lane) {
    return LaneVectors(Traits::kHasOwnRows ? computed_here(lane) : lane);
  }

  // Calls `place(half, where)` for rows `lane` and `lane` + 32 of a consumer's tile. Rows that are
  // not there have the first one's place.
  template <typename Place>
  __device__ __forceinline__ void find_rows(const TileAt& at, int consumer, int lane,
                                            Place&& place) const {
    const int last = rows_of(at.tile, consumer) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane + 32 * half;
      place(half, row_at(at, first_row_of(at, consumer) + (row <= last ? row : 0)));
    }
  }
  __device__ __forceinline__ static int first_row_of(const TileAt& at, int consumer) {
    return at.tile.first_row + consumer * kRowsOfConsumer;
  }

  // Where rows of one kind come from and go to.
  struct Operands {
    const void* q;
    const std::int64_t* stride_q;
    void* out;
    float* lse;
    int num_queries;
    int box_rows;
    device::FastDivide divide_by_box;
    const CUtensorMap* q_map;
    const CUtensorMap* out_map;
  };
  __device__ __forceinline__ Operands operands_of(const Tile& tile) const {
    const Sm90Args& a = params.args;
    if constexpr (Traits::kHasOwnRows) {
      const OwnArgs& own = params.own;
      if (this->is_own(tile)) {
        return {
            own.q,        own.stride_q,      own.out,        own.lse,         a.histories.num_keys,
            own.box_rows, own.divide_by_box, &params.q_user, &params.out_user};
      }
    }
    return {a.q,        a.stride_q,      a.out,     a.lse,      a.num_queries,
            a.box_rows, a.divide_by_box, &params.q, &params.out};
  }

  // Rows come and go in boxes of `box_rows`, which lie in one candidate, or one by one.
  __device__ __forceinline__ bool has_boxes(const Tile& tile) const {
    return operands_of(tile).box_rows > 0;
  }
  struct Box {
    int first_row;  // of the consumer's tile
    Row at;         // its first row
  };
  // Box number `lane`, for lanes below the count of boxes.
  __device__ __forceinline__ Box box_of_lane(const TileAt& at, int consumer, int lane) const {
    const int first_row = lane * operands_of(at.tile).box_rows;
    return {first_row, row_at(at, first_row_of(at, consumer) + first_row)};
  }
  // The last one of a history's own rows may reach beyond them.
  __device__ __forceinline__ int boxes_of(const TileAt& at, int consumer) const {
    const Operands operands = operands_of(at.tile);
    const int beyond = Traits::kHasOwnRows ? operands.box_rows - 1 : 0;
    return operands.divide_by_box(rows_of(at.tile, consumer) + beyond);
  }

  // Whether the consumer's rows are those of candidates that follow each other in the batch.
  __device__ __forceinline__ bool is_run(const TileAt& at, int consumer) const {
    if (!params.args.moves_runs || this->is_own(at.tile)) return false;
    const int first_row = first_row_of(at, consumer);
    const int last = rows_of(at.tile, consumer) - 1;
    if (last < 0) return false;
    const auto number_of = [&](int row) {  // of its candidate, among the user's
      return params.args.divide_by_queries(params.args.divide_by_group(row));
    };
    return row_at(at, first_row + last).cand - row_at(at, first_row).cand ==
           number_of(first_row + last) - number_of(first_row);
  }

  // Number of the consumer's first row among the partial results.
  __device__ __forceinline__ int partial_row(const TileAt& at, int consumer) const {
    return (at.number * params.args.num_kv_heads + at.kv_head) * Traits::kTileRows +
           consumer * kRowsOfConsumer;
  }

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
