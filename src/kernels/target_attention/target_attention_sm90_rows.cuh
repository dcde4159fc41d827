// SPDX-License-Identifier: Apache-2.0
// Rows of any candidates of a user: where they lie, and in what they move.
#pragma once

#include "kernels/target_attention/target_attention_sm90_cta.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Rows : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Element = typename Traits::Element;
  using TileAt = typename Cta::TileAt;
  using Cta::kHeadDim;
  using Cta::params;
  using Cta::row_at;
  using Cta::rows_of;
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
};

}  // namespace ikbo::target_attention_impl
