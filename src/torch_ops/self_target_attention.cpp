// SPDX-License-Identifier: Apache-2.0
// ikbo::self_target_attention and its backward: the attention of each user's history to itself and
// that of the candidates to it, over the same keys and values. Schemas, implementations,
// registration.
//
// The CPU kernel takes a history's rows as candidates of one query each, whose lengths are the keys
// that they may see; candidate u * S + i is row i of user u. Its backward pass takes the rows of
// candidates in the same call, so that it sums a key's gradient once.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/user_rows.h"
#include "torch_ops/aten_calls.h"
#include "torch_ops/attention_cpu.h"
#include "torch_ops/composite_attention.h"
#include "torch_ops/self_attention_args.h"
#ifdef IKBO_WITH_CUDA
#include "torch_ops/self_attention_cuda.h"
#endif

namespace ikbo::ops {
namespace {

using torch::stable::narrow;
using torch::stable::reshape;

// The user of each row that the CPU kernel takes, and how many keys it may see.
struct Rows {
  Rows(const SelfArgs& args, int64_t count)
      : user(torch::stable::new_empty(args.cand_to_user, {count})),
        length(torch::stable::new_empty(args.cand_to_user, {count})) {}

  Tensor user;    // int32 [count]
  Tensor length;  // int32 [count]
};

void fill_history_rows(const SelfArgs& args, const Rows& rows) {
  const auto num_keys = static_cast<int32_t>(args.num_keys());
  std::optional<Tensor> dense;
  const int32_t* lengths = list_data(args.user_lengths, dense);
  auto* user = rows.user.mutable_data_ptr<int32_t>();
  auto* length = rows.length.mutable_data_ptr<int32_t>();
  for (int32_t u = 0; u < static_cast<int32_t>(args.num_users()); ++u) {
    const int32_t num_rows = lengths == nullptr ? num_keys : lengths[u];
    for (int32_t i = 0; i < num_keys; ++i) {
      *user++ = u;
      *length++ = i >= num_rows ? 0 : args.is_causal ? i + 1 : num_keys;
    }
  }
}

// Behind the history's rows.
void fill_cand_rows(const SelfArgs& args, const Rows& rows) {
  const auto num_keys = static_cast<int32_t>(args.num_keys());
  const int64_t num_queries = args.q_cand.size(1);
  const Tensor index = cpu::checked_index(kSelfOp, args.cand_to_user, args.num_users());
  const int32_t* users = index.const_data_ptr<int32_t>();
  std::optional<Tensor> dense;
  const int32_t* lengths = list_data(args.cand_lengths, dense);
  auto* user = rows.user.mutable_data_ptr<int32_t>() + args.num_history_rows();
  auto* length = rows.length.mutable_data_ptr<int32_t>() + args.num_history_rows();
  for (int64_t b = 0; b < index.numel(); ++b) {
    user = std::fill_n(user, num_queries, users[b]);
    length = std::fill_n(length, num_queries, lengths == nullptr ? num_keys : lengths[b]);
  }
}

AttentionArgs row_part(const SelfArgs& args, const Tensor& q, const Tensor& user,
                       const std::optional<Tensor>& length) {
  return {.q = q,
          .k = args.k,
          .v = args.v,
          .cand_to_user = user,
          .user_lengths = args.user_lengths,
          .cand_lengths = length,
          .user_mask = kNoTensor,
          .scale = args.scale,
          .op = kSelfOp};
}

SelfResults run_cpu(const SelfArgs& args) {
  const Rows rows(args, args.num_history_rows());
  fill_history_rows(args, rows);
  const Tensor q_rows =
      reshape(args.q_user, {args.num_history_rows(), 1, args.num_heads(), args.head_dim()});
  const std::optional<Tensor> lengths = rows.length;
  const auto [out_rows, out_cand, lse_rows, lse_cand] =
      run_two_attentions_cpu(row_part(args, q_rows, rows.user, lengths), cand_part(args));
  const Tensor lse = reshape(lse_rows, {args.num_users(), args.num_keys(), args.num_heads()});
  const Tensor lse_user = torch::stable::contiguous(torch::stable::transpose(lse, 1, 2));
  return {reshape(out_rows, args.q_user.sizes()), out_cand, lse_user, lse_cand};
}

// [U, S, ...] above [B, Q, ...], as rows [U * S + B * Q, 1, ...].
Tensor stacked(const Tensor& user, const Tensor& cand) {
  const int64_t num_user = user.size(0) * user.size(1);
  const int64_t num_cand = cand.size(0) * cand.size(1);
  std::vector<int64_t> sizes(user.sizes().begin(), user.sizes().end());
  sizes[0] = num_user + num_cand;
  sizes[1] = 1;
  Tensor rows = torch::stable::new_empty(user, sizes);
  Tensor top = reshape(narrow(rows, 0, 0, num_user), user.sizes());
  Tensor bottom = reshape(narrow(rows, 0, num_user, num_cand), cand.sizes());
  torch::stable::copy_(top, user);
  torch::stable::copy_(bottom, cand);
  return rows;
}

// The log-sum-exps of users [U, H, S] and candidates [B, H, Q], as rows [U * S + B * Q, H, 1].
Tensor stacked_lse(const Tensor& user, const Tensor& cand) {
  const Tensor rows =
      stacked(torch::stable::transpose(user, 1, 2), torch::stable::transpose(cand, 1, 2));
  return torch::stable::transpose(rows, 1, 2);
}

SelfResults run_backward_cpu(const SelfArgs& args, const SelfResults& grads,
                             const SelfResults& results) {
  const auto& [grad_out_user, grad_out_cand, grad_lse_user, grad_lse_cand] = grads;
  const auto& [out_user, out_cand, lse_user, lse_cand] = results;
  const int64_t num_history = args.num_history_rows();
  const Rows rows(args, num_history + args.num_cand_rows());
  fill_history_rows(args, rows);
  fill_cand_rows(args, rows);
  const Tensor q = stacked(args.q_user, args.q_cand);
  const std::optional<Tensor> lengths = rows.length;
  const Tensor grad_out = stacked(grad_out_user, grad_out_cand);
  const Tensor grad_lse = stacked_lse(grad_lse_user, grad_lse_cand);
  auto [grad_q, grad_k, grad_v] = run_attention_backward_cpu(
      row_part(args, q, rows.user, lengths), {grad_out, grad_lse}, stacked(out_user, out_cand),
      torch::stable::contiguous(stacked_lse(lse_user, lse_cand)));
  const auto part = [&grad_q](int64_t begin, const Tensor& like) {
    const int64_t count = like.size(0) * like.size(1);
    return reshape(torch::stable::clone(narrow(grad_q, 0, begin, count)), like.sizes());
  };
  return {part(0, args.q_user), part(num_history, args.q_cand), grad_k, grad_v};
}

// int32 [U]: 0, 1, 2, ...
Tensor each_user(const SelfArgs& args) {
  Tensor steps =
      torch::stable::full({args.num_users()}, 1.0, ScalarType::Int, std::nullopt, args.k.device());
  if (args.num_users() > 0) {
    Tensor first = narrow(steps, 0, 0, 1);
    torch::stable::zero_(first);
  }
  return call_aten("aten::cumsum", "", steps, int64_t{0},
                   std::optional<ScalarType>(ScalarType::Int));
}

AttentionArgs history_part(const SelfArgs& args, const Tensor& users) {
  return {.q = args.q_user,
          .k = args.k,
          .v = args.v,
          .cand_to_user = users,
          .user_lengths = args.user_lengths,
          .cand_lengths = kNoTensor,
          .user_mask = kNoTensor,
          .scale = args.scale,
          .queries = args.is_causal ? Queries::kCausalHistory : Queries::kHistory,
          .op = kSelfOp};
}

SelfResults run_composite(const SelfArgs& args) {
  const Tensor users = each_user(args);
  const auto [out_user, lse_user] = composite::target_attention(history_part(args, users));
  const auto [out_cand, lse_cand] = composite::target_attention(cand_part(args));
  return {out_user, out_cand, lse_user, lse_cand};
}

#ifdef IKBO_WITH_CUDA
SelfResults run_cuda(const SelfArgs& args) {
  const std::optional<SelfResults> results = run_self_attention_cuda(args);
  return results ? *results : run_composite(args);
}
#endif

SelfResults run_composite_backward(const SelfArgs& args, const SelfResults& grads,
                                   const SelfResults& results) {
  const auto& [grad_out_user, grad_out_cand, grad_lse_user, grad_lse_cand] = grads;
  const auto& [out_user, out_cand, lse_user, lse_cand] = results;
  const Tensor users = each_user(args);
  const AttentionArgs cand = cand_part(args);
  composite::KeyGrads sums(cand);
  const Tensor grad_q_user = composite::add_gradients(
      history_part(args, users), {grad_out_user, grad_lse_user}, out_user, lse_user, sums);
  const Tensor grad_q_cand =
      composite::add_gradients(cand, {grad_out_cand, grad_lse_cand}, out_cand, lse_cand, sums);
  const auto [grad_k, grad_v] = sums.finished(cand);
  return {grad_q_user, grad_q_cand, grad_k, grad_v};
}

template <SelfResults (*run)(const SelfArgs&)>
SelfResults forward(const Tensor& q_user, const Tensor& q_cand, const Tensor& k, const Tensor& v,
                    const Tensor& cand_to_user, const std::optional<Tensor>& user_lengths,
                    const std::optional<Tensor>& cand_lengths, bool is_causal,
                    const std::optional<double>& scale) {
  const SelfArgs args{q_user,       q_cand,       k,         v,    cand_to_user,
                      user_lengths, cand_lengths, is_causal, scale};
  check_self(args);
  return run(args);
}

template <SelfResults (*run)(const SelfArgs&, const SelfResults&, const SelfResults&)>
SelfResults backward(const Tensor& grad_out_user, const Tensor& grad_out_cand,
                     const Tensor& grad_lse_user, const Tensor& grad_lse_cand, const Tensor& q_user,
                     const Tensor& q_cand, const Tensor& k, const Tensor& v,
                     const Tensor& cand_to_user, const std::optional<Tensor>& user_lengths,
                     const std::optional<Tensor>& cand_lengths, bool is_causal,
                     const std::optional<double>& scale, const Tensor& out_user,
                     const Tensor& out_cand, const Tensor& lse_user, const Tensor& lse_cand) {
  const SelfArgs args{q_user,       q_cand,       k,         v,    cand_to_user,
                      user_lengths, cand_lengths, is_causal, scale};
  check_self(args);
  return run(args, {grad_out_user, grad_out_cand, grad_lse_user, grad_lse_cand},
             {out_user, out_cand, lse_user, lse_cand});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "self_target_attention(Tensor q_user, Tensor q_cand, Tensor k, Tensor v, "
      "Tensor cand_to_user, Tensor? user_lengths=None, Tensor? cand_lengths=None, "
      "bool is_causal=False, float? scale=None) "
      "-> (Tensor out_user, Tensor out_cand, Tensor lse_user, Tensor lse_cand)");
  m.def(
      "_self_target_attention_backward(Tensor grad_out_user, Tensor grad_out_cand, "
      "Tensor grad_lse_user, Tensor grad_lse_cand, Tensor q_user, Tensor q_cand, Tensor k, "
      "Tensor v, Tensor cand_to_user, Tensor? user_lengths, Tensor? cand_lengths, "
      "bool is_causal, float? scale, Tensor out_user, Tensor out_cand, Tensor lse_user, "
      "Tensor lse_cand) "
      "-> (Tensor grad_q_user, Tensor grad_q_cand, Tensor grad_k, Tensor grad_v)");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("self_target_attention", TORCH_BOX(&forward<&run_cpu>));
  m.impl("_self_target_attention_backward", TORCH_BOX(&backward<&run_backward_cpu>));
}

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("self_target_attention", TORCH_BOX(&forward<&run_cuda>));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("self_target_attention", TORCH_BOX(&forward<&run_composite>));
  m.impl("_self_target_attention_backward", TORCH_BOX(&backward<&run_composite_backward>));
}

}  // namespace ikbo::ops
