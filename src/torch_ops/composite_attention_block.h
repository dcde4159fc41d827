// SPDX-License-Identifier: Apache-2.0
// One block of C candidates of ikbo::composite's attention, in the type of sums. The heads that
// share a kv head become rows: queries [C, H_kv, G * Q, D] with G = H / H_kv, keys and values
// [C, H_kv, S, D]. For composite_attention.cpp alone.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "torch_ops/aten_calls.h"
#include "torch_ops/attention_args.h"
#include "torch_ops/composite.h"

namespace ikbo::composite {

using ops::call_aten;
using torch::headeronly::ScalarType;
using torch::stable::matmul;
using torch::stable::reshape;

inline Tensor rows(const Tensor& t, int64_t begin, int64_t count) {
  Tensor view = t;
  return torch::stable::narrow(view, 0, begin, count);
}

inline Tensor mul(const Tensor& a, const Tensor& b) {
  return call_aten("aten::mul", "Tensor", a, b);
}

inline Tensor where(const Tensor& condition, const Tensor& yes, const Tensor& no) {
  return call_aten("aten::where", "self", condition, yes, no);
}

inline Tensor swapped(const Tensor& t, int64_t d0, int64_t d1) {
  return torch::stable::transpose(t, d0, d1);
}

// S; of packed histories that of the longest, for which the host reads the offsets.
inline int64_t longest_history(const ops::AttentionArgs& args) {
  if (!args.is_packed()) {
    return args.k.size(1);
  }
  const torch::stable::Device host(torch::headeronly::DeviceType::CPU);
  const Tensor offsets = torch::stable::contiguous(torch::stable::to(*args.user_offsets, host));
  return ops::checked_longest_history(offsets, args.k.size(0));
}

inline ScalarType sum_dtype(const ops::AttentionArgs& args) {
  return args.q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// What all blocks of a call share.
struct Facts {
  explicit Facts(const ops::AttentionArgs& args)
      : dtype(sum_dtype(args)),
        is_packed(args.is_packed()),
        num_keys(longest_history(args)),
        num_kv_heads(args.num_kv_heads()),
        head_dim(args.q.size(3)),
        group(args.q.size(2) / num_kv_heads),
        group_rows(group * args.q.size(1)),
        scale(
            constant(args.q, args.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim))))),
        zero(constant(args.q, 0.0)),
        minus_infinity(constant(args.q, -std::numeric_limits<double>::infinity())),
        ordinals(count_to(args.q, num_keys)),
        user_lengths(args.user_lengths) {
    if (is_packed) {
      const std::optional<Tensor> nothing;
      user_lengths = call_aten("aten::diff", "", *args.user_offsets, int64_t{1}, int64_t{-1},
                               nothing, nothing);
    }
  }

  Tensor constant(const Tensor& like, double value) const {
    return torch::stable::full({}, value, dtype, std::nullopt, like.device());
  }

  // 1, 2, ..., n in int32 on the device of `like`.
  static Tensor count_to(const Tensor& like, int64_t n) {
    const Tensor ones = torch::stable::full({n}, 1.0, ScalarType::Int, std::nullopt, like.device());
    return call_aten("aten::cumsum", "", ones, int64_t{0},
                     std::optional<ScalarType>(ScalarType::Int));
  }

  // [C, X, H, D] to [C, H_kv, G * X, D] in the type of sums, G = 1 where H is H_kv.
  Tensor grouped(const Tensor& t) const {
    const Tensor wide = swapped(torch::stable::to(t, dtype), 1, 2);
    const int64_t num_rows = t.size(1) * t.size(2) / num_kv_heads;
    return reshape(wide, {t.size(0), num_kv_heads, num_rows, head_dim});
  }

  // `yes` [C, H_kv, G * Q, X] where the condition, which broadcasts to [C, H_kv, G, Q, X], holds.
  Tensor where_query(const Tensor& condition, const Tensor& yes, const Tensor& no) const {
    const Tensor by_query = reshape(yes, {yes.size(0), num_kv_heads, group, num_keys, yes.size(3)});
    return reshape(where(condition, by_query, no), yes.sizes());
  }

  // The histories [C, H_kv, S, D] of a block, in the type of sums.
  Tensor gathered(const Tensor& t, const Tensor& key_rows, int64_t count) const {
    return grouped(reshape(expand(t, key_rows), {count, num_keys, num_kv_heads, head_dim}));
  }

  ScalarType dtype;
  bool is_packed;
  int64_t num_keys;  // S, packed: of the longest history
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t group;       // G
  int64_t group_rows;  // G * Q
  Tensor scale;
  Tensor zero;
  Tensor minus_infinity;
  Tensor ordinals;                     // 1 ... S, int32
  std::optional<Tensor> user_lengths;  // [U] int32
};

// Which keys count for each candidate of a block, [C, 1, S, 1]; all where nothing is given.
inline std::optional<Tensor> counting_keys(const ops::AttentionArgs& args, const Facts& facts,
                                           const Tensor& index, int64_t begin) {
  const int64_t count = index.size(0);
  std::optional<Tensor> counts;
  const auto restrict_to = [&counts](const Tensor& more) {
    counts = counts ? call_aten("aten::logical_and", "", *counts, more) : more;
  };
  const auto below = [&](const Tensor& lengths) {
    return call_aten("aten::le", "Tensor", facts.ordinals, reshape(lengths, {count, 1}));
  };
  if (facts.user_lengths) {
    restrict_to(below(expand(*facts.user_lengths, index)));
  }
  if (args.cand_lengths) {
    restrict_to(below(rows(*args.cand_lengths, begin, count)));
  }
  if (args.user_mask) {
    restrict_to(expand(*args.user_mask, index));
  }
  if (counts) {
    counts = reshape(*counts, {count, 1, facts.num_keys, 1});
  }
  return counts;
}

// The rows of packed k and v that hold the keys of the candidates' users, int32 [C * S]; some row
// past the end of a shorter history.
inline Tensor packed_rows(const ops::AttentionArgs& args, const Facts& facts, const Tensor& index) {
  const int64_t count = index.size(0);
  const Tensor begins =
      reshape(expand(rows(*args.user_offsets, 0, args.num_users()), index), {count, 1});
  const auto constant = [&](int64_t value) {
    return torch::stable::full({1, 1}, static_cast<double>(value), ScalarType::Int, std::nullopt,
                               args.q.device());
  };
  // begin, 1, 1, ... summed up: the stable ABI adds no integers.
  const Tensor is_first = call_aten("aten::le", "Tensor", facts.ordinals, constant(1));
  const Tensor steps = where(is_first, begins, constant(1));
  const Tensor sums =
      call_aten("aten::cumsum", "", steps, int64_t{1}, std::optional<ScalarType>(ScalarType::Int));
  const Tensor last = constant(args.k.size(0) - 1);
  return reshape(call_aten("aten::minimum", "", sums, last), {count * facts.num_keys});
}

// Rows of k and v, and what one of them is: a whole history [S, H_kv, D], or a key [H_kv, D] of
// packed ones.
inline Tensor gathered_rows(const ops::AttentionArgs& args, const Facts& facts,
                            const Tensor& index) {
  return args.is_packed() ? packed_rows(args, facts, index) : index;
}

struct Block {
  Block(const ops::AttentionArgs& args, const Facts& facts, int64_t begin, int64_t count)
      : key_rows(gathered_rows(args, facts, rows(args.cand_to_user, begin, count))),
        q(mul(facts.grouped(rows(args.q, begin, count)), facts.scale)),
        k(facts.gathered(args.k, key_rows, count)),
        v(facts.gathered(args.v, key_rows, count)),
        counts(counting_keys(args, facts, rows(args.cand_to_user, begin, count), begin)) {
    if (counts) {
      // Keys that do not count may hold anything, NaN too.
      k = where(*counts, k, facts.zero);
      v = where(*counts, v, facts.zero);
    }
    std::optional<Tensor> is_query;
    if (counts && args.queries != ops::Queries::kCandidates) {
      // History rows that are no keys are no queries either.
      is_query = reshape(*counts, {count, 1, 1, facts.num_keys, 1});
      q = facts.where_query(*is_query, q, facts.zero);
    }
    scores = matmul(q, swapped(k, 2, 3));
    if (counts) {
      scores = where(swapped(*counts, 2, 3), scores, facts.minus_infinity);
    }
    if (is_query) {
      scores = facts.where_query(*is_query, scores, facts.minus_infinity);
    }
    if (args.queries == ops::Queries::kCausalHistory) {
      const Tensor row = reshape(facts.ordinals, {facts.num_keys, 1});
      const Tensor is_past = call_aten("aten::le", "Tensor", facts.ordinals, row);
      scores = facts.where_query(is_past, scores, facts.minus_infinity);
    }
  }

  // Softmax weights [C, H_kv, G * Q, S]; zeros in rows without a key.
  Tensor weights(const Tensor& lse, const Facts& facts) const {
    const Tensor exponentials = call_aten("aten::exp", "", torch::stable::subtract(scores, lse));
    return where(call_aten("aten::isneginf", "", lse), facts.zero, exponentials);
  }

  Tensor key_rows;  // of k and v, one or S per candidate
  Tensor q;         // times scale
  Tensor k;
  Tensor v;
  std::optional<Tensor> counts;  // counting_keys
  Tensor scores;
};

template <typename Body>
void for_each_block(const ops::AttentionArgs& args, const Facts& facts, const Body& body) {
  const int64_t num_candidates = args.q.size(0);
  // As many as k holds histories of S keys.
  const int64_t num_histories =
      args.is_packed() ? args.k.size(0) / std::max<int64_t>(1, facts.num_keys) : args.num_users();
  // A history's own S rows have S x S scores.
  constexpr int64_t kMaxOwnBlocks = 64;
  const int64_t block = args.queries == ops::Queries::kCandidates
                            ? block_size(num_histories, num_candidates)
                            : (num_candidates + kMaxOwnBlocks - 1) / kMaxOwnBlocks;
  for (int64_t begin = 0; begin < num_candidates; begin += block) {
    body(begin, std::min(block, num_candidates - begin));
  }
}

}  // namespace ikbo::composite
