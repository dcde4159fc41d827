// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/composite_attention.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "torch_ops/composite_attention_block.h"

namespace ikbo::composite {
namespace {

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
    Tensor block_out = matmul(block.weights(block_lse, facts), block.v);
    if (args.queries != ops::Queries::kCandidates) {
      // A row without a key stays 0 beside keys of its user that hold NaN.
      block_out = where(call_aten("aten::isneginf", "", block_lse), facts.zero, block_out);
    }
    store(out, block_out, begin);
    Tensor lse_rows = rows(lse, begin, count);
    torch::stable::copy_(lse_rows, reshape(block_lse, lse_rows.sizes()));
  });
  return {out, lse};
}

KeyGrads::KeyGrads(const ops::AttentionArgs& args) {
  const int64_t num_rows = args.k.size(0);
  int64_t row_elements = args.num_kv_heads() * args.q.size(3);
  if (!args.is_packed()) {
    row_elements *= args.k.size(1);
  }
  k = torch::stable::new_zeros(args.k, {num_rows, row_elements}, sum_dtype(args));
  v = torch::stable::new_zeros(args.v, {num_rows, row_elements}, sum_dtype(args));
}

std::tuple<Tensor, Tensor> KeyGrads::finished(const ops::AttentionArgs& args) const {
  const auto like = [](const Tensor& sum, const Tensor& t) {
    return reshape(torch::stable::to(sum, t.scalar_type()), t.sizes());
  };
  return {like(k, args.k), like(v, args.v)};
}

Tensor add_gradients(const ops::AttentionArgs& args, const ops::AttentionGrads& grads,
                     const Tensor& out, const Tensor& lse, KeyGrads& sums) {
  const Facts facts(args);
  const Tensor grad_q = torch::stable::new_empty(args.q, args.q.sizes());
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
    add_to_rows(sums.k, matmul(swapped(grad_scores, 2, 3), block.q), block, facts);
    add_to_rows(sums.v, matmul(swapped(weights, 2, 3), grad_out), block, facts);
  });
  return grad_q;
}

std::tuple<Tensor, Tensor, Tensor> target_attention_backward(const ops::AttentionArgs& args,
                                                             const ops::AttentionGrads& grads,
                                                             const Tensor& out, const Tensor& lse) {
  KeyGrads sums(args);
  const Tensor grad_q = add_gradients(args, grads, out, lse, sums);
  const auto [grad_k, grad_v] = sums.finished(args);
  return {grad_q, grad_k, grad_v};
}

}  // namespace ikbo::composite
