// SPDX-License-Identifier: Apache-2.0
// Backward kernel of target attention: one task, i.e. all rows of one user and kv head.
//
// P is recomputed from the log-sum-exp for a tile of rows and a block of keys at a time:
//   P = exp(scale q.k - lse)            dV = P^T dO
//   dS = P (dO.V - sum(dO O) + dlse)    dQ = scale dS K      dK = scale dS^T Q
// A task owns its user's rows of dK and dV and sums them in a fixed order: no atomics.
#pragma once

#include "cpu/target_attention_forward.h"

namespace ikbo::cpu::IKBO_ISA {

template <class T>
struct BackwardScratch {
  BackwardScratch(Carver<T>& carver, int row_tile, int key_block, int dim, int num_keys)
      : padded(round_up<T>(dim)),
        q(carver.take(std::int64_t{row_tile} * padded)),
        grad_out(carver.take(std::int64_t{row_tile} * padded)),
        grad_q(carver.take(std::int64_t{row_tile} * padded)),
        row_lse(carver.take(row_tile)),
        row_delta(carver.take(row_tile)),
        p(carver.take(std::int64_t{row_tile} * key_block)),
        grad_s(carver.take(std::int64_t{row_tile} * key_block)),
        k_transposed(carver.take(panels_size<T>(dim, key_block))),
        v_transposed(carver.take(panels_size<T>(dim, key_block))),
        k(carver.take(panels_size<T>(key_block, dim))),
        staging(carver.take(std::int64_t{kLanes<T>} * padded)),
        grad_k(carver.take(std::int64_t{num_keys} * padded)),
        grad_v(carver.take(std::int64_t{num_keys} * padded)) {}

  int padded;       // D rounded up
  T* q;             // [row_tile, padded], scaled
  T* grad_out;      // [row_tile, padded]
  T* grad_q;        // [row_tile, padded]
  T* row_lse;       // [row_tile], base 2
  T* row_delta;     // [row_tile], sum(dO O) - dlse
  T* p;             // [row_tile, key_block]
  T* grad_s;        // [row_tile, key_block]
  T* k_transposed;  // [key_block / kPanel, D, kPanel]
  T* v_transposed;  // [key_block / kPanel, D, kPanel]
  T* k;             // panels of [key_block, kPanel]
  T* staging;       // [kLanes, padded]
  T* grad_k;        // [num_keys, padded]
  T* grad_v;        // [num_keys, padded]
};

template <class T>
void fill_zero(T* dst, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    dst[i] = T{0};
  }
}

// What a tile of rows needs besides its queries: dO, the log-sum-exp and sum(dO O) - dlse.
template <class T, class Storage>
void load_row_gradients(const TargetAttentionGradParams& params, const TargetAttentionTask& tile,
                        const BackwardScratch<T>& s) {
  const TargetAttentionParams& forward = params.forward;
  const int dim = forward.head_dim;
  for (int r = 0; r < tile.row_end - tile.row_begin; ++r) {
    const RowPlace place = row_place(forward, tile, tile.row_begin + r);
    T* grad_out = s.grad_out + std::int64_t{r} * s.padded;
    load_row(static_cast<const Storage*>(params.grad_out) + place.element(forward), 1, dim,
             grad_out, s.padded);
    const Storage* out = static_cast<const Storage*>(forward.out) + place.element(forward);
    T delta{0};
    for (int d = 0; d < dim; ++d) {
      delta += grad_out[d] * widen(out[d]);
    }
    delta -= static_cast<const T*>(params.grad_lse)[place.statistic(forward)];
    s.row_delta[r] = delta;
    s.row_lse[r] =
        static_cast<const T*>(forward.lse)[place.statistic(forward)] * static_cast<T>(kLog2e);
  }
}

// Scores to P, and dP to dS, in place; zero from `count` up to `padded_count` keys.
template <class T>
void softmax_gradient(T* p, T* grad_s, int count, int padded_count, T lse, T delta) {
  // A row whose scores are all -inf has no probabilities.
  const int used = lse == -std::numeric_limits<T>::infinity() ? 0 : count;
  for (int i = 0; i < used; i += kLanes<T>) {
    const Vec<T> prob = exp2_of(load(p + i) - lse);
    store<T>(p + i, prob);
    store<T>(grad_s + i, prob * (load(grad_s + i) - delta));
  }
  fill_zero(p + used, padded_count - used);
  fill_zero(grad_s + used, padded_count - used);
}

// Adds one tile of rows against one block of n keys: counts[r] of them count for row `first` + r.
template <class T>
void add_gradients(const BackwardScratch<T>& s, const TargetAttentionConfig& config, int dim,
                   int first, int rows, std::int64_t key0, int n, const int* counts) {
  const int key_block = config.key_block;
  const int padded = s.padded;
  const int vecs = padded / kLanes<T>;
  const std::int64_t row0 = std::int64_t{first} * padded;
  const int padded_keys = round_up<T>(n);
  const auto product = [&](const T* a, const T* transposed, T* c) {
    gemm<T>({.a = a + row0,
             .a_row = padded,
             .a_k = 1,
             .b = transposed,
             .b_k = kPanel<T>,
             .b_panel = std::int64_t{dim} * kPanel<T>,
             .n_k = dim,
             .c = c,
             .c_row = key_block,
             .start = Start::kZero},
            rows, padded_keys / kLanes<T>);
  };
  product(s.q, s.k_transposed, s.p);
  product(s.grad_out, s.v_transposed, s.grad_s);
  for (int r = 0; r < rows; ++r) {
    softmax_gradient(s.p + std::int64_t{r} * key_block, s.grad_s + std::int64_t{r} * key_block,
                     counts[r], padded_keys, s.row_lse[first + r], s.row_delta[first + r]);
  }
  const auto sum_over_rows = [&](const T* weights, const T* values, T* grad) {
    gemm<T>({.a = weights,
             .a_row = 1,
             .a_k = key_block,
             .b = values + row0,
             .b_k = padded,
             .b_panel = kPanel<T>,
             .n_k = rows,
             .c = grad + key0 * padded,
             .c_row = padded,
             .start = Start::kAccumulate},
            n, vecs);
  };
  sum_over_rows(s.p, s.grad_out, s.grad_v);
  sum_over_rows(s.grad_s, s.q, s.grad_k);
  gemm_ragged<T>({.a = s.grad_s,
                  .a_row = key_block,
                  .a_k = 1,
                  .b = s.k,
                  .b_k = kPanel<T>,
                  .b_panel = std::int64_t{key_block} * kPanel<T>,
                  .c = s.grad_q + row0,
                  .c_row = padded,
                  .start = Start::kAccumulate},
                 counts, rows, vecs);
}

template <class T, class Storage>
void store_scaled(const T* src, double factor, int n, Storage* dst) {
  for (int i = 0; i < n; ++i) {
    dst[i] = narrow<Storage>(src[i] * static_cast<T>(factor));
  }
}

// All key blocks for one tile of rows; writes dQ, adds to dK and dV.
template <class T, class Storage>
void backward_tile(const TargetAttentionGradParams& params, const TargetAttentionTask& tile,
                   const TargetAttentionConfig& config, const BackwardScratch<T>& s) {
  const TargetAttentionParams& forward = params.forward;
  const int rows = tile.row_end - tile.row_begin;
  const int dim = forward.head_dim;
  const KeyRows<Storage> k = key_rows<Storage>(forward, forward.k, forward.stride_k, tile);
  const KeyRows<Storage> v = key_rows<Storage>(forward, forward.v, forward.stride_v, tile);
  load_queries<T, Storage>(forward, tile, s.q, s.padded);
  load_row_gradients<T, Storage>(params, tile, s);
  fill_zero(s.grad_q, std::int64_t{rows} * s.padded);
  const int num_keys = row_place(forward, tile, tile.row_end - 1).key_count;
  for (int key0 = 0, first = 0; key0 < num_keys; key0 += config.key_block) {
    const int n = num_keys - key0 < config.key_block ? num_keys - key0 : config.key_block;
    pack_transposed(k, key0, n, dim, s.staging, s.k_transposed);
    pack_transposed(v, key0, n, dim, s.staging, s.v_transposed);
    pack_panels(k, key0, n, dim, s.k, std::int64_t{config.key_block} * kPanel<T>);
    while (row_place(forward, tile, tile.row_begin + first).key_count <= key0) {
      ++first;
    }
    int counts[kMaxRowTile];
    block_counts(forward, tile, tile.row_begin + first, rows - first, key0, n, counts);
    add_gradients(s, config, dim, first, rows - first, key0, n, counts);
  }
  for (int r = 0; r < rows; ++r) {
    const RowPlace place = row_place(forward, tile, tile.row_begin + r);
    store_scaled(s.grad_q + std::int64_t{r} * s.padded, forward.scale, dim,
                 static_cast<Storage*>(params.grad_q) + place.element(forward));
  }
}

template <class T, class Storage>
void backward_task(const TargetAttentionGradParams& params, const TargetAttentionTask& task,
                   const TargetAttentionConfig& config, void* scratch) {
  const TargetAttentionParams& forward = params.forward;
  const int dim = forward.head_dim;
  Carver<T> carver(scratch);
  const BackwardScratch<T> s(carver, config.row_tile, config.key_block, dim, forward.num_keys);
  const int num_keys = row_place(forward, task, task.row_end - 1).key_count;
  fill_zero(s.grad_k, std::int64_t{num_keys} * s.padded);
  fill_zero(s.grad_v, std::int64_t{num_keys} * s.padded);
  for (int row = task.row_begin; row < task.row_end; row += config.row_tile) {
    TargetAttentionTask tile = task;
    tile.row_begin = row;
    tile.row_end = task.row_end - row < config.row_tile ? task.row_end : row + config.row_tile;
    backward_tile<T, Storage>(params, tile, config, s);
  }
  const std::int64_t key_stride = std::int64_t{forward.num_kv_heads} * dim;
  const std::int64_t first_row = forward.user_offsets == nullptr
                                     ? std::int64_t{task.user} * forward.num_keys
                                     : forward.user_offsets[task.user];
  for (std::int64_t key = 0; key < num_keys; ++key) {
    const std::int64_t position = task.key_rows == nullptr ? key : task.key_rows[key];
    const std::int64_t offset =
        (first_row + position) * key_stride + std::int64_t{task.kv_head} * dim;
    // q is scaled by scale * log2(e) already.
    store_scaled(s.grad_k + key * s.padded, kLn2, dim,
                 static_cast<Storage*>(params.grad_k) + offset);
    store_scaled(s.grad_v + key * s.padded, 1.0, dim,
                 static_cast<Storage*>(params.grad_v) + offset);
  }
}

}  // namespace ikbo::cpu::IKBO_ISA
