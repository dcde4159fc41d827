// SPDX-License-Identifier: Apache-2.0
// Gradients of target attention: two kernels of one shape, without atomics.
//
//   queries  a CTA owns 64 rows of one user and kv head and walks over the user's keys: grad_q
//   keys     a CTA owns 64 keys of one user and kv head and walks over all rows of the user's
//            candidates: grad_k, grad_v
// Both compute the scores of their tile with a block of 64 of the other kind anew from q, k and
// lse. Four warps have 16 rows of the tile each and keep their sums in registers.
// Keys that count for no candidate of the user are not read: their rows in shared memory are 0.
#pragma once

#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/target_attention_backward/target_attention_backward_launch.h"
#include "kernels/target_attention_backward/target_attention_backward_mma.cuh"

namespace ikbo::target_attention_backward_impl {

// What the scores of a row of a candidate need.
struct RowFacts {
  float lse_log2;  // +inf: a row that is not there, or has no key; its weights are 0
  float term;
  int limit;  // keys that count for it
};

template <typename Element, int kHeadDim, int kStep>
struct Cta {
  using Product = Products<Element, kHeadDim, kStep>;
  using Scores = typename Product::Scores;
  using Sums = typename Product::Sums;
  using Word = std::uint16_t;
  static constexpr int kPitch = Product::kPitch;
  static constexpr int kVectors = kHeadDim / 8;  // of 16 bytes in a row

  struct Shared {
    alignas(16) Word own[2][kTileRows * kPitch];
    alignas(16) Word other[2][kBlock * kPitch];
    std::int64_t offsets[kBlock];  // of rows of candidates in q; -1: not there
    RowFacts rows[kBlock];
  };
  static_assert(sizeof(Shared) <= 99 * 1024);  // what a CTA has on every architecture

  const Args& args;
  Shared& shared;
  int user;
  int kv_head;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int warp = static_cast<int>(threadIdx.x) / 32;

  // Finds rows first, first + 1, ... of the user's `num_rows`. By the first threads.
  __device__ __forceinline__ void find_rows(int first, int num_rows) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kBlock) return;
    constexpr float kInfinity = __builtin_huge_valf();
    RowFacts facts{kInfinity, 0.0f, 0};
    std::int64_t offset = -1;
    if (const int row = first + thread; row < num_rows) {
      const int above = args.divide_by_group(row);
      const int position = args.divide_by_queries(above);
      const int head = kv_head * args.group + row - above * args.group;
      const int query = above - position * args.num_queries;
      const std::int64_t cand = args.order[args.first_cands[user] + position];
      const std::int64_t rows_before = cand * args.num_queries * args.num_heads;
      offset = (rows_before + std::int64_t{query} * args.num_heads + head) * args.head_dim;
      const std::int64_t at = rows_before + std::int64_t{head} * args.num_queries + query;
      const float lse = args.lse[at];
      facts.lse_log2 = lse == -kInfinity ? kInfinity : lse * 1.44269504088896f;
      facts.term = args.row_terms[at];
      facts.limit = args.num_keys_of_users[user];
      if (args.cand_lengths != nullptr) facts.limit = min(facts.limit, args.cand_lengths[cand]);
    }
    shared.offsets[thread] = offset;
    shared.rows[thread] = facts;
  }

  // 64 rows of an operand into shared memory, asynchronously; `offset_of(row)` below 0: zeros.
  template <typename OffsetOf>
  __device__ __forceinline__ void copy_rows(Word* s_rows, const void* g_operand,
                                            OffsetOf&& offset_of) const {
    const auto* g = static_cast<const Word*>(g_operand);
    const std::uint32_t s_first = device::smem_address(s_rows);
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kVectors; i += kThreads) {
      const int row = i / kVectors;
      const int d = i % kVectors * 8;
      const std::int64_t offset = offset_of(row);
      const bool exists = offset >= 0 && d < args.head_dim;
      device::copy_async<16>(s_first + (row * kPitch + d) * 2, exists ? g + offset + d : g,
                             exists ? 16 : 0);
    }
  }
  __device__ __forceinline__ void copy_candidates(Word (&s_rows)[2][kBlock * kPitch]) const {
    const auto offset_of = [&](int row) { return shared.offsets[row]; };
    copy_rows(s_rows[0], args.q, offset_of);
    copy_rows(s_rows[1], args.grad_out, offset_of);
  }
  __device__ __forceinline__ std::int64_t offset_of_key(int key) const {
    return ((std::int64_t{user} * args.num_keys + key) * args.num_kv_heads + kv_head) *
           args.head_dim;
  }
  __device__ __forceinline__ void copy_keys(Word (&s_rows)[2][kBlock * kPitch], int first_key,
                                            int num_keys) const {
    const auto offset_of = [&](int row) {
      return first_key + row < num_keys ? offset_of_key(first_key + row) : std::int64_t{-1};
    };
    copy_rows(s_rows[0], args.k, offset_of);
    copy_rows(s_rows[1], args.v, offset_of);
  }

  // The products of the warp's rows with those of the block from `step` on.
  __device__ __forceinline__ void multiply(Scores& scores, Scores& grads, int step) const {
    const int own = warp * 16 * kPitch;
    Product::add_scores(scores, shared.own[0] + own, shared.other[0] + step * kPitch, lane);
    Product::add_scores(grads, shared.own[1] + own, shared.other[1] + step * kPitch, lane);
  }

  // Turns the products of a row and a key into the weight and the gradient of the score.
  __device__ __forceinline__ void differentiate(float& score, float& grad, const RowFacts& row,
                                                int key) const {
    const bool counts = key < row.limit;
    score = counts ? exp2f(fmaf(score, args.scale_log2, -row.lse_log2)) : 0.0f;
    grad = counts ? score * (grad - row.term) : 0.0f;
  }

  // The warp's 16 rows times `factor`, rounded; `offset_of(row)` below 0: no such row.
  template <typename OffsetOf>
  __device__ __forceinline__ void store(Sums& sums, void* g_target, float factor,
                                        OffsetOf&& offset_of) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t offset = offset_of(warp * 16 + Sums::row_of(lane, i));
      if (offset < 0) continue;
      auto* g_row = static_cast<Element*>(g_target) + offset;
#pragma unroll
      for (int c = 0; c < Sums::kColumns; c += 2) {
        const int column = Sums::column_of(lane, c);
        if (column >= args.head_dim) continue;
        *reinterpret_cast<std::uint32_t*>(g_row + column) =
            device::round_pair<Element>(sums.at(i, c) * factor, sums.at(i, c + 1) * factor);
      }
    }
  }

  __device__ __forceinline__ void queries(int tile) const {
    const int num_rows = args.rows_of(args.first_cands[user + 1] - args.first_cands[user]);
    find_rows((tile - args.first_tiles[user]) * kTileRows, num_rows);
    __syncthreads();
    copy_candidates(shared.own);
    const RowFacts rows[2] = {shared.rows[warp * 16 + Sums::row_of(lane, 0)],
                              shared.rows[warp * 16 + Sums::row_of(lane, 1)]};
    const int num_keys = args.num_keys_of_users[user];
    Sums grad_q;
#pragma unroll 1
    for (int first_key = 0; first_key < num_keys; first_key += kBlock) {
      __syncthreads();  // the block before has been read
      copy_keys(shared.other, first_key, num_keys);
      device::copy_async_commit();
      device::copy_async_wait<0>();
      __syncthreads();
#pragma unroll 1
      for (int step = 0; step < kBlock; step += kStep) {
        Scores scores;
        Scores grads;
        multiply(scores, grads, step);
#pragma unroll
        for (int j = 0; j < Scores::kColumns; ++j) {
          const int key = first_key + step + Scores::column_of(lane, j);
#pragma unroll
          for (int i = 0; i < 2; ++i) differentiate(scores.at(i, j), grads.at(i, j), rows[i], key);
        }
        Product::add_products(grad_q, grads, shared.other[0] + step * kPitch, lane);
      }
    }
    device::copy_async_wait<0>();
    store(grad_q, args.grad_q, args.scale, [&](int row) { return shared.offsets[row]; });
  }

  __device__ __forceinline__ void keys(int first_key) const {
    const int num_keys = args.num_keys_of_users[user];
    const int num_rows = first_key < num_keys
                             ? args.rows_of(args.first_cands[user + 1] - args.first_cands[user])
                             : 0;
    if (num_rows > 0) copy_keys(shared.own, first_key, num_keys);
    Sums grad_k;
    Sums grad_v;
#pragma unroll 1
    for (int first_row = 0; first_row < num_rows; first_row += kBlock) {
      __syncthreads();  // the block before has been read
      find_rows(first_row, num_rows);
      __syncthreads();
      copy_candidates(shared.other);
      device::copy_async_commit();
      device::copy_async_wait<0>();
      __syncthreads();
#pragma unroll 1
      for (int step = 0; step < kBlock; step += kStep) {
        Scores scores;
        Scores grads;
        multiply(scores, grads, step);
#pragma unroll
        for (int j = 0; j < Scores::kColumns; ++j) {
          const RowFacts row = shared.rows[step + Scores::column_of(lane, j)];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_key + warp * 16 + Scores::row_of(lane, i);
            differentiate(scores.at(i, j), grads.at(i, j), row, key);
          }
        }
        Product::add_products(grad_v, scores, shared.other[1] + step * kPitch, lane);
        Product::add_products(grad_k, grads, shared.other[0] + step * kPitch, lane);
      }
    }
    const auto offset_of = [&](int row) {
      return first_key + row < args.num_keys ? offset_of_key(first_key + row) : std::int64_t{-1};
    };
    store(grad_k, args.grad_k, args.scale, offset_of);
    store(grad_v, args.grad_v, 1.0f, offset_of);
  }
};

// Two sums of 128 columns leave registers for half the scores.
template <typename Element, int kHeadDim>
using QueriesCta = Cta<Element, kHeadDim, kBlock>;
template <typename Element, int kHeadDim>
using KeysCta = Cta<Element, kHeadDim, kHeadDim == 128 ? kBlock / 2 : kBlock>;

template <typename OfCta>
__device__ __forceinline__ OfCta make_cta(const Args& args, int user) {
  extern __shared__ __align__(16) unsigned char s_raw[];
  return {args, *reinterpret_cast<typename OfCta::Shared*>(s_raw), user,
          static_cast<int>(blockIdx.y)};
}

// grid: tiles of rows, kv heads
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    target_attention_backward_queries_kernel(const __grid_constant__ Args args) {
  const int tile = static_cast<int>(blockIdx.x);
  if (tile >= args.first_tiles[args.num_users]) return;
  int user = 0;  // the last one whose first tile is not above this one
  for (int end = args.num_users; end - user > 1;) {
    const int middle = (user + end) / 2;
    (args.first_tiles[middle] <= tile ? user : end) = middle;
  }
  make_cta<QueriesCta<Element, kHeadDim>>(args, user).queries(tile);
}

// grid: (tile of keys, user), kv heads
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    target_attention_backward_keys_kernel(const __grid_constant__ Args args) {
  const int tiles = (args.num_keys + kTileRows - 1) / kTileRows;
  const int user = static_cast<int>(blockIdx.x) / tiles;
  const int tile = static_cast<int>(blockIdx.x) - user * tiles;
  make_cta<KeysCta<Element, kHeadDim>>(args, user).keys(tile * kTileRows);
}

}  // namespace ikbo::target_attention_backward_impl
