// SPDX-License-Identifier: Apache-2.0
// Target attention on any architecture since sm_80, for operands of any stride and alignment: tiles
// of 64 rows of one user and kv head by blocks of the user's keys.
//
// All four warps copy; each computes 16 rows, whose softmax and output it keeps in registers. A
// block of K is on its way while the values of the block before are multiplied, its V while its
// keys are. Two barriers a block: the first makes K visible and frees V of the block before, the
// second makes V visible and frees K.
//
// Keys that count for none of the user's candidates, by length or by mask, are not read: their rows
// in shared memory are 0 and their weights too. Blocks without a key that counts are passed over.
//
// An engine says how the products are computed and which rows, keys and columns a lane holds:
// MmaEngine, SimtEngine.
#pragma once

#include <cstdint>

#include "kernels/target_attention/target_attention_generic_args.cuh"
#include "kernels/target_attention/target_attention_generic_copy.cuh"
#include "kernels/target_attention/target_attention_sm90_softmax.cuh"

namespace ikbo::target_attention_impl {

static_assert(kGenericTileRows == kGenericThreads / 32 * kWarpRows);

// Where a row of a user lies.
struct GenericRow {
  int cand;
  int query;
  int head;

  __device__ __forceinline__ std::int64_t first_row_of_cand(const GenericArgs& a) const {
    return std::int64_t{cand} * a.num_queries * a.num_heads;
  }
  // In out, and in lse.
  __device__ __forceinline__ std::int64_t out_at(const GenericArgs& a) const {
    return (first_row_of_cand(a) + std::int64_t{query} * a.num_heads + head) * a.head_dim;
  }
  __device__ __forceinline__ std::int64_t lse_at(const GenericArgs& a) const {
    return first_row_of_cand(a) + std::int64_t{head} * a.num_queries + query;
  }
};

__device__ __forceinline__ GenericRow locate_row(const GenericArgs& a, const Tile& tile,
                                                 int kv_head, int row_of_tile) {
  const int row = tile.first_row + row_of_tile;
  const int above = a.divide_by_group(row);
  const int position = a.divide_by_queries(above);
  return {a.grouped_cands[tile.first_cand + position], above - position * a.num_queries,
          kv_head * a.group + row - above * a.group};
}

// `number` counts tiles and, of each, the ranges of keys.
__device__ __forceinline__ std::int64_t partial_row(const GenericArgs& a, int number, int kv_head,
                                                    int row_of_tile) {
  return (std::int64_t{number} * a.num_kv_heads + kv_head) * kGenericTileRows + row_of_tile;
}

// The softmax of the rows of a lane, over blocks of keys.
template <typename Engine>
struct GenericSoftmax {
  static constexpr float kMinusInfinity = -__builtin_huge_valf();
  static constexpr int kRows = Engine::kRows;

  float top[kRows];
  float sum[kRows] = {};  // of this lane's keys

  __device__ __forceinline__ GenericSoftmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) top[i] = kMinusInfinity;
  }

  // Turns logits into weights, exp2(logit * scale_log2 - top) with the row's largest so far, and
  // brings the output to it.
  __device__ __forceinline__ void step(typename Engine::Logits& s, float scale_log2,
                                       typename Engine::Outputs& out) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float new_top = top[i];
#pragma unroll
      for (int j = 0; j < Engine::kKeys; ++j) {
        new_top = fmaxf(new_top, s.at(i, j) * scale_log2);
      }
#pragma unroll
      for (int lanes = 1; lanes < Engine::kLanesOfRow; lanes *= 2) {
        new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, lanes));
      }
      // No key so far: weights are exp2(-inf), not exp2(-inf + inf).
      const float reference = new_top == kMinusInfinity ? 0.0f : new_top;
      const float factor = Engine::exp2(top[i] - reference);
      top[i] = new_top;
      sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < Engine::kKeys; ++j) {
        const float weight = Engine::exp2(fmaf(s.at(i, j), scale_log2, -reference));
        s.at(i, j) = weight;
        sum[i] += weight;
      }
      if (!__any_sync(~0u, factor != 1.0f)) continue;
#pragma unroll
      for (int c = 0; c < Engine::kColumns; ++c) out.at(i, c) *= factor;
    }
  }

  // Of all keys, alike in the lanes of a row; 0 for a row without a key.
  __device__ __forceinline__ float sum_of_row(int i) const {
    float total = sum[i];
#pragma unroll
    for (int lanes = 1; lanes < Engine::kLanesOfRow; lanes *= 2) {
      total += __shfl_xor_sync(~0u, total, lanes);
    }
    return total;
  }
};

template <typename Engine>
struct GenericTile {
  using Element = typename Engine::Element;
  using Word = typename Engine::Word;
  using Logits = typename Engine::Logits;
  using Outputs = typename Engine::Outputs;
  static constexpr int kRows = Engine::kRows;
  static constexpr int kKeyBlock = Engine::kKeyBlock;
  static constexpr int kPitch = Engine::kPitch;

  struct Shared {
    alignas(16) Word q[kGenericTileRows * kPitch];
    alignas(16) Word k[kKeyBlock * kPitch];
    alignas(16) Word v[kKeyBlock * kPitch];
    GenericRow rows[kGenericTileRows];
  };
  static_assert(sizeof(Shared) <= 99 * 1024);  // what a CTA has on every architecture

  const GenericArgs& args;
  Shared& shared;
  const Tile& tile;
  int number;
  int kv_head;
  int warp;
  int lane;

  // Keys of a block that count for any of the user's candidates, a bit each.
  struct Block {
    int first_key;  // of the tile's
    std::uint64_t counts;

    __device__ __forceinline__ bool exists() const { return counts != 0; }
    __device__ __forceinline__ bool is_full() const { return counts == first_bits(kKeyBlock); }
  };
  static __device__ __forceinline__ std::uint64_t first_bits(int count) {
    return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  }

  // The first block from `first_key` on that has such a key. By whole warps, to the same end.
  __device__ __forceinline__ Block next_block(int first_key) const {
    for (; first_key < tile.num_keys; first_key += kKeyBlock) {
      const int keys = min(tile.num_keys - first_key, kKeyBlock);
      std::uint64_t counts = first_bits(keys);
      if (args.user_mask != nullptr) {
        const bool* g_mask = args.user_mask + std::int64_t{tile.history} * args.num_keys +
                             tile.first_key + first_key;
        counts = 0;
#pragma unroll
        for (int key = 0; key < kKeyBlock; key += 32) {
          const bool is_counted = key + lane < keys && g_mask[key + lane];
          counts |= std::uint64_t{__ballot_sync(~0u, is_counted)} << key;
        }
      }
      if (counts != 0) return {first_key, counts};
    }
    return {tile.num_keys, 0};
  }

  __device__ __forceinline__ bool has_rows() const { return warp * kWarpRows < tile.num_rows; }

  __device__ __forceinline__ void locate_rows() const {
    const int row = static_cast<int>(threadIdx.x);
    if (row < tile.num_rows) shared.rows[row] = locate_row(args, tile, kv_head, row);
  }

  __device__ __forceinline__ void load_queries() const {
    const auto* g_q = static_cast<const Word*>(args.q.data);
    RowCopies<Engine, kGenericTileRows>::copy(
        shared.q, args.q, args.head_dim, [&](int row) -> const Word* {
          if (row >= tile.num_rows) return nullptr;
          const GenericRow at = shared.rows[row];
          return g_q + at.cand * args.q.stride[0] + at.query * args.q.stride[1] +
                 at.head * args.q.stride[2];
        });
  }

  // A block of K or V.
  __device__ __forceinline__ void load_block(Word* s_block, const GenericOperand& operand,
                                             const Block& block) const {
    const auto* g_block = static_cast<const Word*>(operand.data) +
                          tile.history * operand.stride[0] +
                          (std::int64_t{tile.first_key} + block.first_key) * operand.stride[1] +
                          kv_head * operand.stride[2];
    RowCopies<Engine, kKeyBlock>::copy(
        s_block, operand, args.head_dim, [&](int key) -> const Word* {
          return (block.counts >> key & 1) != 0 ? g_block + key * operand.stride[1] : nullptr;
        });
    device::copy_async_commit();
  }

  // How many of the tile's keys count for each row of this lane, beside those of the user.
  struct Limits {
    int of_row[kRows];
  };
  __device__ __forceinline__ Limits limits_of_rows() const {
    Limits limits;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = warp * kWarpRows + Engine::row_of(lane, i);
      limits.of_row[i] = tile.num_keys;
      if (args.cand_lengths != nullptr && row < tile.num_rows) {
        limits.of_row[i] = args.cand_lengths[shared.rows[row].cand] - tile.keys_before;
      }
    }
    return limits;
  }

  // Keys that do not count for a row become absent.
  __device__ __forceinline__ void mask(Logits& s, const Block& block, const Limits& limits) const {
    if (block.is_full() && args.cand_lengths == nullptr) return;
    const std::uint64_t counts = block.counts >> Engine::first_key(lane);
    const int first_key = block.first_key + Engine::first_key(lane);
#pragma unroll
    for (int j = 0; j < Engine::kKeys; ++j) {
      const int step = Engine::key_step(j);
      const bool counts_for_user = (counts >> step & 1) != 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!counts_for_user || first_key + step >= limits.of_row[i]) {
          s.at(i, j) = args.absent_logit;
        }
      }
    }
  }

  // Calls `place(column, values)` for this lane's vectors of columns of its row `i`, divided by the
  // sum. Of a row without a key, whose `inverse` is 0, they are 0 whatever V holds.
  template <typename Place>
  __device__ __forceinline__ void visit_outputs(Outputs& out, int i, float inverse,
                                                Place&& place) const {
#pragma unroll
    for (int c = 0; c < Engine::kColumns; c += Engine::kVector) {
      float values[Engine::kVector];
#pragma unroll
      for (int e = 0; e < Engine::kVector; ++e) {
        values[e] = inverse == 0 ? 0.0f : out.at(i, c + e) * inverse;
      }
      place(Engine::first_column(lane) + Engine::column_step(c), values);
    }
  }

  __device__ __forceinline__ void store_row(Outputs& out, int i, int row, float inverse,
                                            float lse) const {
    if (args.partial_out != nullptr) {
      const std::int64_t at = partial_row(args, number, kv_head, row);
      if (lane % Engine::kLanesOfRow == 0) args.partial_lse[at] = lse;
      if (inverse == 0) return;
      float* g_row = args.partial_out + at * Engine::kHeadDim;
      visit_outputs(out, i, inverse,
                    [&](int column, const auto& values) { store_vector(g_row + column, values); });
      return;
    }
    const GenericRow place = shared.rows[row];
    if (lane % Engine::kLanesOfRow == 0) args.lse[place.lse_at(args)] = lse;
    Element* g_row = static_cast<Element*>(args.out) + place.out_at(args);
    visit_outputs(out, i, inverse, [&](int column, const auto& values) {
      if (args.stores_vectors) {
        if (column < args.head_dim) store_vector(g_row + column, values);
        return;
      }
#pragma unroll
      for (int e = 0; e < Engine::kVector; ++e) {
        if (column + e < args.head_dim) g_row[column + e] = static_cast<Element>(values[e]);
      }
    });
  }
  static __device__ __forceinline__ void store_vector(float* g_target, const float (&values)[2]) {
    *reinterpret_cast<float2*>(g_target) = make_float2(values[0], values[1]);
  }
  static __device__ __forceinline__ void store_vector(float* g_target, const float (&values)[4]) {
    *reinterpret_cast<float4*>(g_target) = make_float4(values[0], values[1], values[2], values[3]);
  }
  template <typename Narrow>
  static __device__ __forceinline__ void store_vector(Narrow* g_target, const float (&values)[2]) {
    *reinterpret_cast<std::uint32_t*>(g_target) = round_pair<Narrow>(values[0], values[1]);
  }

  __device__ __forceinline__ void store(Outputs& out, const GenericSoftmax<Engine>& softmax) const {
    constexpr float kLn2 = 0.69314718055994531f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float sum = softmax.sum_of_row(i);
      const int row = warp * kWarpRows + Engine::row_of(lane, i);
      if (row >= tile.num_rows) continue;
      const bool has_keys = sum != 0;
      const float lse = (softmax.top[i] + log2f(sum)) * kLn2;
      store_row(out, i, row, has_keys ? 1 / sum : 0.0f,
                has_keys ? lse : GenericSoftmax<Engine>::kMinusInfinity);
    }
  }

  // By all threads of the CTA; ends with every thread past its last use of shared memory.
  __device__ __forceinline__ void run() const {
    locate_rows();
    __syncthreads();
    const Limits limits = limits_of_rows();
    GenericSoftmax<Engine> softmax;
    Outputs out;
    Block block = next_block(0);
    if (block.exists()) {
      load_queries();
      load_block(shared.k, args.k, block);
    }
#pragma unroll 1
    while (block.exists()) {
      device::copy_async_wait<0>();
      __syncthreads();  // K is there, V free
      load_block(shared.v, args.v, block);
      Logits logits;
      if (has_rows()) {
        Engine::multiply_keys(logits, shared.q + warp * kWarpRows * kPitch, shared.k, lane);
      }
      device::copy_async_wait<0>();
      __syncthreads();  // V is there, K free
      const Block next = next_block(block.first_key + kKeyBlock);
      if (next.exists()) load_block(shared.k, args.k, next);
      if (has_rows()) {
        mask(logits, block, limits);
        softmax.step(logits, args.scale_log2, out);
        Engine::multiply_values(out, logits, shared.v, lane);
      }
      block = next;
    }
    if (has_rows()) store(out, softmax);
    __syncthreads();
  }
};

template <typename Engine>
__global__ void __launch_bounds__(kGenericThreads, Engine::kCtasPerSm)
    target_attention_generic_kernel(const __grid_constant__ GenericArgs args) {
  using OfTile = GenericTile<Engine>;
  extern __shared__ __align__(16) unsigned char s_raw[];
  auto& shared = *reinterpret_cast<typename OfTile::Shared*>(s_raw);
  const std::int64_t num_items =
      std::int64_t{*args.num_tiles} * args.num_splits * args.num_kv_heads;
  for (std::int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int number = static_cast<int>(item / args.num_kv_heads);
    const Tile tile = args.tiles[number];
    const OfTile of_tile{.args = args,
                         .shared = shared,
                         .tile = tile,
                         .number = number,
                         .kv_head = static_cast<int>(item % args.num_kv_heads),
                         .warp = static_cast<int>(threadIdx.x) / 32,
                         .lane = static_cast<int>(threadIdx.x) % 32};
    of_tile.run();
  }
}

}  // namespace ikbo::target_attention_impl
