// SPDX-License-Identifier: Apache-2.0
// One block of C candidates at a time, in the type of sums. The heads that share a kv head become
// rows: queries [C, H_kv, G * Q, D] with G = H / H_kv, keys and values [C, H_kv, S, D].
#include "torch_ops/composite_attention.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
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

// What all blocks of a call share.
struct Facts {
  explicit Facts(const ops::AttentionArgs& args)
      : dtype(args.q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float),
        num_keys(args.k.size(1)),
        num_kv_heads(args.k.size(2)),
        head_dim(args.q.size(3)),
        group_rows(args.q.size(2) / num_kv_heads * args.q.size(1)),
        scale(
            constant(args.q, args.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim))))),
        zero(constant(args.q, 0.0)),
        minus_infinity(constant(args.q, -std::numeric_limits<double>::infinity())) {}

  Tensor constant(const Tensor& like, double value) const {
    return torch::stable::full({}, value, dtype, std::nullopt, like.device());
  }

  // [C, X, H, D] to [C, H_kv, G * X, D] in the type of sums, G = 1 where H is H_kv.
  Tensor grouped(const Tensor& t) const {
    const Tensor wide = swapped(torch::stable::to(t, dtype), 1, 2);
    const int64_t num_rows = t.size(1) * t.size(2) / num_kv_heads;
    return reshape(wide, {t.size(0), num_kv_heads, num_rows, head_dim});
  }

  ScalarType dtype;
  int64_t num_keys;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t group_rows;
  Tensor scale;
  Tensor zero;
  Tensor minus_infinity;
};

// Which keys count for each candidate of a block, [C, 1, S, 1]; all where nothing is given.
std::optional<Tensor> counting_keys(const ops::AttentionArgs& args, const Tensor& index,
                                    int64_t begin) {
  const int64_t count = index.size(0);
  const int64_t num_keys = args.k.size(1);
  std::optional<Tensor> counts;
  const auto restrict_to = [&counts](const Tensor& more) {
    counts = counts ? call_aten("aten::logical_and", "", *counts, more) : more;
  };
  const auto below = [&](const Tensor& lengths) {
    const Tensor ones =
        torch::stable::full({num_keys}, 1.0, ScalarType::Int, std::nullopt, args.q.device());
    const std::optional<ScalarType> same_dtype = ScalarType::Int;
    const Tensor ordinals = call_aten("aten::cumsum", "", ones, int64_t{0}, same_dtype);
    return call_aten("aten::le", "Tensor", ordinals, reshape(lengths, {count, 1}));
  };
  if (args.user_lengths) {
    restrict_to(below(expand(*args.user_lengths, index)));
  }
  if (args.cand_lengths) {
    restrict_to(below(rows(*args.cand_lengths, begin, count)));
  }
  if (args.user_mask) {
    restrict_to(expand(*args.user_mask, index));
  }
  if (counts) {
    counts = reshape(*counts, {count, 1, num_keys, 1});
  }
  return counts;
}

struct Block {
  Block(const ops::AttentionArgs& args, const Facts& facts, int64_t begin, int64_t count)
      : index(rows(args.cand_to_user, begin, count)),
        q(mul(facts.grouped(rows(args.q, begin, count)), facts.scale)),
        k(facts.grouped(expand(args.k, index))),
        v(facts.grouped(expand(args.v, index))) {
    const std::optional<Tensor> counts = counting_keys(args, index, begin);
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

  Tensor index;
  Tensor q;  // times scale
  Tensor k;
  Tensor v;
  Tensor scores;
};

template <typename Body>
void for_each_block(const ops::AttentionArgs& args, const Body& body) {
  const int64_t num_candidates = args.q.size(0);
  const int64_t block = block_size(args.k.size(0), num_candidates);
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

// sum[u] += the blocks [H_kv, S, D] of u's candidates; sum [U, S * H_kv * D].
void add_to_users(Tensor& sum, const Tensor& grouped, const Tensor& index) {
  const Tensor values = reshape(swapped(grouped, 1, 2), {grouped.size(0), sum.size(1)});
  const Tensor user = reshape(torch::stable::to(index, ScalarType::Long), {-1, 1});
  const std::vector<int64_t> sizes{values.size(0), values.size(1)};
  const Tensor element_user = call_aten("aten::expand", "", user, sizes, false);
  sum = call_aten("aten::scatter_add", "", sum, int64_t{0}, element_user, values);
}

}  // namespace

std::tuple<Tensor, Tensor> target_attention(const ops::AttentionArgs& args) {
  const Facts facts(args);
  const Tensor out = torch::stable::new_empty(args.q, args.q.sizes());
  const Tensor lse = torch::stable::new_empty(
      args.q, {args.q.size(0), args.q.size(2), args.q.size(1)}, facts.dtype);
  for_each_block(args, [&](int64_t begin, int64_t count) {
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
                                                             const AttentionGrads& grads,
                                                             const Tensor& out, const Tensor& lse) {
  const Facts facts(args);
  const Tensor grad_q = torch::stable::new_empty(args.q, args.q.sizes());
  const int64_t row_elements = facts.num_keys * facts.num_kv_heads * facts.head_dim;
  Tensor sum_k = torch::stable::new_zeros(args.k, {args.k.size(0), row_elements}, facts.dtype);
  Tensor sum_v = torch::stable::new_zeros(args.v, {args.v.size(0), row_elements}, facts.dtype);
  for_each_block(args, [&](int64_t begin, int64_t count) {
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
    add_to_users(sum_k, matmul(swapped(grad_scores, 2, 3), block.q), block.index);
    add_to_users(sum_v, matmul(swapped(weights, 2, 3), grad_out), block.index);
  });
  const auto finished = [](const Tensor& sum, const Tensor& like) {
    return reshape(torch::stable::to(sum, like.scalar_type()), like.sizes());
  };
  return {grad_q, finished(sum_k, args.k), finished(sum_v, args.v)};
}

namespace {

std::tuple<Tensor, Tensor> checked_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& cand_to_user,
                                           const std::optional<Tensor>& user_lengths,
                                           const std::optional<Tensor>& cand_lengths,
                                           const std::optional<Tensor>& user_mask,
                                           const std::optional<double>& scale) {
  const ops::AttentionArgs args{q,         k,    v, cand_to_user, user_lengths, cand_lengths,
                                user_mask, scale};
  ops::check_attention(args);
  return target_attention(args);
}

std::tuple<Tensor, Tensor, Tensor> checked_backward(
    const Tensor& grad_out, const Tensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& cand_to_user, const std::optional<Tensor>& user_lengths,
    const std::optional<Tensor>& cand_lengths, const std::optional<Tensor>& user_mask,
    const std::optional<double>& scale, const Tensor& out, const Tensor& lse) {
  const ops::AttentionArgs args{q,         k,    v, cand_to_user, user_lengths, cand_lengths,
                                user_mask, scale};
  ops::check_attention(args);
  return target_attention_backward(args, {grad_out, grad_lse}, out, lse);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("target_attention", TORCH_BOX(&checked_forward));
  m.impl("_target_attention_backward", TORCH_BOX(&checked_backward));
}

}  // namespace ikbo::composite
