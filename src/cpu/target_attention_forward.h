// SPDX-License-Identifier: Apache-2.0
// Forward kernel of target attention: one task, i.e. some rows of one user and kv head.
//
// The keys are walked in blocks. A block's K is packed transposed once and used for all rows, a few
// rows at a time: scores (in base 2: q is scaled by scale * log2(e)), online softmax, product with
// V. Rows come by ascending key count, so those that are done leave at the front, and a tile's rows
// share their first keys; what one row has beyond them is added for it alone. Hence a key that
// does not count for a row never enters its sums, even as 0 * NaN.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/target_attention_gemm.h"
#include "ikbo/target_attention.h"

namespace ikbo::cpu::IKBO_ISA {

inline constexpr double kLog2e = 1.44269504088896340736;
inline constexpr double kLn2 = 0.69314718055994530942;

// Rows whose scores are in the first-level cache at once.
inline constexpr int kRowGroup = 4 * kTileRows;

// Carves arrays out of a thread's scratch memory; with a null base it only counts.
template <class T>
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<T*>(base)) {}

  T* take(std::int64_t count) {
    const std::int64_t begin = used_;
    used_ += (count + 15) / 16 * 16;
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  std::int64_t used_bytes() const { return used_ * static_cast<std::int64_t>(sizeof(T)); }

 private:
  T* base_;
  std::int64_t used_ = 0;
};

template <class T>
struct ForwardScratch {
  ForwardScratch(Carver<T>& carver, int rows, int key_block, int dim)
      : q(carver.take(std::int64_t{rows} * dim)),
        out(carver.take(std::int64_t{rows} * round_up<T>(dim))),
        row_max(carver.take(rows)),
        row_sum(carver.take(rows)),
        row_scale(carver.take(kRowGroup)),
        scores(carver.take(std::int64_t{kRowGroup} * key_block)),
        k_transposed(carver.take(panels_size<T>(dim, key_block))),
        v(carver.take(panels_size<T>(key_block, dim))),
        staging(carver.take(std::int64_t{kLanes<T>} * round_up<T>(dim))) {}

  T* q;             // [rows, D], scaled
  T* out;           // [rows, D rounded up], not normalised
  T* row_max;       // [rows], base 2
  T* row_sum;       // [rows]
  T* row_scale;     // [kRowGroup]
  T* scores;        // [kRowGroup, key_block]
  T* k_transposed;  // [key_block / kPanel, D, kPanel]
  T* v;             // panels of [key_block, kPanel]
  T* staging;       // [kLanes, D rounded up]
};

struct RowPlace {
  std::int64_t cand;
  std::int64_t query;
  std::int64_t head;
  int key_count;

  // Offsets into contiguous tensors [B, Q, H, D] and [B, H, Q].
  std::int64_t element(const TargetAttentionParams& params) const {
    return ((cand * params.num_queries + query) * params.num_heads + head) * params.head_dim;
  }
  std::int64_t statistic(const TargetAttentionParams& params) const {
    return (cand * params.num_heads + head) * params.num_queries + query;
  }
};

inline RowPlace row_place(const TargetAttentionParams& params, const TargetAttentionTask& task,
                          int row) {
  const int group = params.num_heads / params.num_kv_heads;
  const int cand_idx = row / (params.num_queries * group);
  return {task.cands[cand_idx], row / group % params.num_queries,
          static_cast<std::int64_t>(task.kv_head) * group + row % group, task.key_counts[cand_idx]};
}

// `data` is k or v.
template <class Storage>
KeyRows<Storage> key_rows(const TargetAttentionParams& params, const void* data,
                          const std::array<std::int64_t, 4>& stride,
                          const TargetAttentionTask& task) {
  const std::int64_t history = params.user_offsets == nullptr
                                   ? task.user * stride[0]
                                   : params.user_offsets[task.user] * stride[1];
  return {static_cast<const Storage*>(data) + history + task.kv_head * stride[2], stride[1],
          stride[3], task.key_rows};
}

// Turns n scores of a row into probabilities relative to its running maximum; returns the factor
// that brings what was summed before to the new maximum.
template <class T>
T softmax_step(T* scores, int n, T& row_max, T& row_sum) {
  constexpr T kMinusInf = -std::numeric_limits<T>::infinity();
  const int padded = round_up<T>(n);
  for (int i = n; i < padded; ++i) {
    scores[i] = kMinusInf;
  }
  Vec<T> max_vec = load(scores);
  for (int i = kLanes<T>; i < padded; i += kLanes<T>) {
    max_vec = max_of(max_vec, load(scores + i));
  }
  const T block_max = reduce<T>(max_vec, [](auto a, auto b) { return max_of(a, b); });
  const T new_max = max_of(row_max, block_max);
  // All scores so far -inf: their weights are 0, not exp(-inf + inf).
  const T reference = new_max == kMinusInf ? T{0} : new_max;
  Vec<T> sum_vec{};
  for (int i = 0; i < padded; i += kLanes<T>) {
    const Vec<T> p = exp2_of(load(scores + i) - reference);
    store<T>(scores + i, p);
    sum_vec += p;
  }
  const T scale = exp2_of(broadcast(row_max - reference))[0];
  row_sum = row_sum * scale + reduce<T>(sum_vec, [](auto a, auto b) { return a + b; });
  row_max = new_max;
  return scale;
}

// V of one block of keys, as the matrix product reads it.
template <class T>
struct ValueBlock {
  const T* data;
  std::int64_t key_stride;
  std::int64_t panel_stride;
};

// Packs a block's K transposed, and V unless it can be read in place.
template <class T, class Storage>
ValueBlock<T> pack_block(const KeyRows<Storage>& k, const KeyRows<Storage>& v, int dim,
                         std::int64_t key0, int n, int key_block, const ForwardScratch<T>& s) {
  pack_transposed(k, key0, n, dim, s.staging, s.k_transposed);
  if constexpr (std::is_same_v<T, Storage>) {
    if (v.stride_dim == 1 && v.positions == nullptr && dim % kLanes<T> == 0) {
      return {v.row(key0), v.stride_key, kPanel<T>};
    }
  }
  const std::int64_t panel_size = std::int64_t{key_block} * kPanel<T>;
  pack_panels(v, key0, n, dim, s.v, panel_size);
  return {s.v, kPanel<T>, panel_size};
}

// Adds a block of keys to rows row0 ... row0 + rows - 1, at most kRowGroup of them; counts[r] of
// its keys count for row row0 + r.
template <class T>
void attend(const ValueBlock<T>& v, const int* counts, int row0, int rows, int dim, int key_block,
            const ForwardScratch<T>& s) {
  const int vecs = round_up<T>(dim) / kLanes<T>;
  const std::int64_t out_row = round_up<T>(dim);
  gemm<T>({.a = s.q + std::int64_t{row0} * dim,
           .a_row = dim,
           .a_k = 1,
           .b = s.k_transposed,
           .b_k = kPanel<T>,
           .b_panel = std::int64_t{dim} * kPanel<T>,
           .n_k = dim,
           .c = s.scores,
           .c_row = key_block,
           .start = Start::kZero},
          rows, round_up<T>(counts[rows - 1]) / kLanes<T>);
  for (int r = 0; r < rows; ++r) {
    s.row_scale[r] = softmax_step(s.scores + std::int64_t{r} * key_block, counts[r],
                                  s.row_max[row0 + r], s.row_sum[row0 + r]);
  }
  gemm_ragged<T>({.a = s.scores,
                  .a_row = key_block,
                  .a_k = 1,
                  .b = v.data,
                  .b_k = v.key_stride,
                  .b_panel = v.panel_stride,
                  .c = s.out + row0 * out_row,
                  .c_row = out_row,
                  .start = Start::kScale,
                  .row_scale = s.row_scale},
                 counts, rows, vecs);
}

// dst[row, :] = the task's queries times scale * log2(e), `dst_row` elements apart and zero-filled.
template <class T, class Storage>
void load_queries(const TargetAttentionParams& params, const TargetAttentionTask& task, T* dst,
                  int dst_row) {
  const T factor = static_cast<T>(params.scale * kLog2e);
  for (int r = task.row_begin; r < task.row_end; ++r, dst += dst_row) {
    const RowPlace place = row_place(params, task, r);
    const Storage* src = static_cast<const Storage*>(params.q) + place.cand * params.stride_q[0] +
                         place.query * params.stride_q[1] + place.head * params.stride_q[2];
    load_row(src, params.stride_q[3], params.head_dim, dst, dst_row);
    for (int d = 0; d < params.head_dim; ++d) {
      dst[d] *= factor;
    }
  }
}

// Keys of the block that begins at key0 and holds n: how many count for each row from `first` on.
inline void block_counts(const TargetAttentionParams& params, const TargetAttentionTask& task,
                         int first, int rows, int key0, int n, int* counts) {
  for (int r = 0; r < rows; ++r) {
    const int rest = row_place(params, task, first + r).key_count - key0;
    counts[r] = rest < 0 ? 0 : rest < n ? rest : n;
  }
}

template <class T, class Storage>
void store_results(const TargetAttentionParams& params, const TargetAttentionTask& task, int rows,
                   const ForwardScratch<T>& s) {
  const int dim = params.head_dim;
  for (int r = 0; r < rows; ++r) {
    const RowPlace place = row_place(params, task, task.row_begin + r);
    const T* src = s.out + std::int64_t{r} * round_up<T>(dim);
    Storage* dst = static_cast<Storage*>(params.out) + place.element(params);
    const T sum = s.row_sum[r];
    const T divisor = sum == T{0} ? T{1} : sum;
    for (int d = 0; d < dim; ++d) {
      dst[d] = narrow<Storage>(src[d] / divisor);
    }
    static_cast<T*>(params.lse)[place.statistic(params)] =
        static_cast<T>((s.row_max[r] + ::log2(static_cast<double>(sum))) * kLn2);
  }
}

template <class T, class Storage>
void forward_task(const TargetAttentionParams& params, const TargetAttentionTask& task,
                  const TargetAttentionConfig& config, void* scratch) {
  const int rows = task.row_end - task.row_begin;
  const int dim = params.head_dim;
  Carver<T> carver(scratch);
  const ForwardScratch<T> s(carver, config.row_tile, config.key_block, dim);
  load_queries<T, Storage>(params, task, s.q, dim);
  for (std::int64_t i = 0; i < std::int64_t{rows} * round_up<T>(dim); ++i) {
    s.out[i] = T{0};
  }
  for (int r = 0; r < rows; ++r) {
    s.row_max[r] = -std::numeric_limits<T>::infinity();
    s.row_sum[r] = T{0};
  }
  const KeyRows<Storage> k = key_rows<Storage>(params, params.k, params.stride_k, task);
  const KeyRows<Storage> v = key_rows<Storage>(params, params.v, params.stride_v, task);
  const auto key_count = [&](int r) {
    return row_place(params, task, task.row_begin + r).key_count;
  };
  const int num_keys = key_count(rows - 1);
  int first = 0;
  for (int key0 = 0; key0 < num_keys; key0 += config.key_block) {
    const int n = num_keys - key0 < config.key_block ? num_keys - key0 : config.key_block;
    const ValueBlock<T> values = pack_block(k, v, dim, key0, n, config.key_block, s);
    while (key_count(first) <= key0) {
      ++first;
    }
    for (int row0 = first; row0 < rows; row0 += kRowGroup) {
      const int group = rows - row0 < kRowGroup ? rows - row0 : kRowGroup;
      int counts[kRowGroup];
      block_counts(params, task, task.row_begin + row0, group, key0, n, counts);
      attend(values, counts, row0, group, dim, config.key_block, s);
    }
  }
  store_results<T, Storage>(params, task, rows, s);
}

}  // namespace ikbo::cpu::IKBO_ISA
