// SPDX-License-Identifier: Apache-2.0
// One block of C candidates at a time, in the type of sums. The heads that share a kv head become
// rows: queries [C, H_kv, G * Q, D] with G = H / H_kv, keys and values [C, H_kv, S, D].
#include "torch_ops/composite_attention.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "torch_ops/aten_calls.h"
#include "torch_ops/composite.h"

namespace ikbo::composite {
namespace {

using ops::call_aten;
using torch::headeronly::ScalarType;
using torch::stable::matmul;
using torch::stable::reshape;

Tensor rows(const Tensor& t, int64_t begin, int64_t count) {
  Tensor view = t;
  return torch::stable::narrow(view, 0, begin, count);
}

Tensor mul(const Tensor& a, const Tensor& b) { return call_aten("aten::mul", "Tensor", a, b); }

Tensor where(const Tensor& condition, const Tensor& yes, const Tensor& no) {
  return call_aten("aten::where", "self", condition, yes, no);
}

Tensor swapped(const Tensor& t, int64_t d0, int64_t d1) {
  return torch::stable::transpose(t, d0, d1);
}

// S; of packed histories that of the longest, for which the host reads the offsets.
int64_t longest_history(const ops::AttentionArgs& args) {
  if (!args.is_packed()) {
    return args.k.size(1);
  }
  const torch::stable::Device host(torch::headeronly::DeviceType::CPU);
  const Tensor offsets = torch::stable::contiguous(torch::stable::to(*args.user_offsets, host));
  return ops::checked_longest_history(offsets, args.k.size(0));
}

// What all blocks of a call share.
struct Facts {
  explicit Facts(const ops::AttentionArgs& args)
      : dtype(args.q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float),
        is_packed(args.is_packed()),
        num_keys(longest_history(args)),
        num_kv_heads(args.num_kv_heads()),
        head_dim(args.q.size(3)),
        group_rows(args.q.size(2) / num_kv_heads * args.q.size(1)),
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
  Tensor count_to(const Tensor& like, int64_t n) const {
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

  // The histories [C, H_kv, S, D] of a block, in the type of sums.
  Tensor gathered(const Tensor& t, const Tensor& key_rows, int64_t count) const {
    return grouped(reshape(expand(t, key_rows), {count, num_keys, num_kv_heads, head_dim}));
  }

  ScalarType dtype;
  bool is_packed;
  int64_t num_keys;  // S, packed: of the longest history
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t group_rows;
  Tensor scale;
  Tensor zero;
  Tensor minus_infinity;
  Tensor ordinals;                     // 1 ... S, int32
  std::optional<Tensor> user_lengths;  // [U] int32
};

// Which keys count for each candidate of a block, [C, 1, S, 1]; all where nothing is given.
std::optional<Tensor> counting_keys(const ops::AttentionArgs& args, const Facts& facts,
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
Tensor packed_rows(const ops::AttentionArgs& args, const Facts& facts, const Tensor& index) {
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
Tensor gathered_rows(const ops::AttentionArgs& args, const Facts& facts, const Tensor& index) {
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
    scores = matmul(q, swapped(k, 2, 3));
    if (counts) {
      scores = where(swapped(*counts, 2, 3), scores, facts.minus_infinity);
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
  const int64_t block = block_size(num_histories, num_candidates);
  for (int64_t begin = 0; begin < num_candidates; begin += block) {
    body(begin, std::min(block, num_candidates - begin));
  }
}

// [C, H_kv, G * Q, D] to the candidates' rows of a [B, Q, H, D] tensor.
void store(const Tensor& whole, const Tensor& grouped, int64_t begin) {
  Tensor target = rows(whole, begin, grouped.size(0));
  torch::stable::copy_(
      target,
      swapped(reshape(grouped, {target.size(0), target.size(2), target.size(1), target.size(3)}), 1,
              2));
}

// sum[row] += the block's share in each row of k or v; grouped [C, H_kv, S, D].
void add_to_rows(Tensor& sum, const Tensor& grouped, const Block& block, const Facts& facts) {
  // Rows past the end of a packed history are others' keys.
  const Tensor counting = facts.is_packed ? where(*block.counts, grouped, facts.zero) : grouped;
  const int64_t num_rows = block.key_rows.size(0);
  const Tensor values = reshape(swapped(counting, 1, 2), {num_rows, sum.size(1)});
  const Tensor row = reshape(torch::stable::to(block.key_rows, ScalarType::Long), {num_rows, 1});
  const std::vector<int64_t> sizes{values.size(0), values.size(1)};
  const Tensor element_row = call_aten("aten::expand", "", row, sizes, false);
  sum = call_aten("aten::scatter_add", "", sum, int64_t{0}, element_row, values);
}

}  // namespace

std::tuple<Tensor, Tensor> target_attention(const ops::AttentionArgs& args) {
  const Facts facts(args);
  const Tensor out = torch::stable::new_empty(args.q, args.q.sizes());
  const Tensor lse = torch::stable::new_empty(
      args.q, {args.q.size(0), args.q.size(2), args.q.size(1)}, facts.dtype);
  for_each_block(args, facts, [&](int64_t begin, int64_t count) {
    const Block block(args, facts, begin, count);
    const std::vector<int64_t> last_dim{-1};
    const Tensor block_lse = call_aten("aten::logsumexp", "", block.scores, last_dim, true);
    store(out, matmul(block.weights(block_lse, facts), block.v), begin);
    Tensor lse_rows = rows(lse, begin, count);
    torch::stable::copy_(lse_rows, reshape(block_lse, lse_rows.sizes()));
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> target_attention_backward(const ops::AttentionArgs& args,
                                                             const ops::AttentionGrads& grads,
                                                             const Tensor& out, const Tensor& lse) {
  const Facts facts(args);
  const Tensor grad_q = torch::stable::new_empty(args.q, args.q.sizes());
  const int64_t row_elements =
      (facts.is_packed ? 1 : facts.num_keys) * facts.num_kv_heads * facts.head_dim;
  Tensor sum_k = torch::stable::new_zeros(args.k, {args.k.size(0), row_elements}, facts.dtype);
  Tensor sum_v = torch::stable::new_zeros(args.v, {args.v.size(0), row_elements}, facts.dtype);
  for_each_block(args, facts, [&](int64_t begin, int64_t count) {
    const Block block(args, facts, begin, count);
    const auto row_values = [&](const Tensor& t) {
      return reshape(torch::stable::to(rows(t, begin, count), facts.dtype),
                     {count, facts.num_kv_heads, facts.group_rows, 1});
    };
    const Tensor weights = block.weights(row_values(lse), facts);
    const Tensor grad_out = facts.grouped(rows(grads.out, begin, count));
    const Tensor product = mul(grad_out, facts.grouped(rows(out, begin, count)));
    // d loss / d score = weight * (grad_out . v - grad_out . out + grad_lse)
    const std::vector<int64_t> last_dim{-1};
    const Tensor row_term = torch::stable::subtract(
        torch::stable::sum(product, last_dim, /*keepdim=*/true), row_values(grads.lse));
    const Tensor grad_weights = matmul(grad_out, swapped(block.v, 2, 3));
    const Tensor grad_scores = mul(weights, torch::stable::subtract(grad_weights, row_term));
    store(grad_q, mul(matmul(grad_scores, block.k), facts.scale), begin);
    add_to_rows(sum_k, matmul(swapped(grad_scores, 2, 3), block.q), block, facts);
    add_to_rows(sum_v, matmul(swapped(weights, 2, 3), grad_out), block, facts);
  });
  const auto finished = [](const Tensor& sum, const Tensor& like) {
    return reshape(torch::stable::to(sum, like.scalar_type()), like.sizes());
  };
  return {grad_q, finished(sum_k, args.k), finished(sum_v, args.v)};
}

}  // namespace ikbo::composite
