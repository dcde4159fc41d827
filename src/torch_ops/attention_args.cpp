// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/attention_args.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace ikbo::ops {
namespace {

// An absent tensor stands for q on q's device, and is not looked at again.
Named named(const char* name, const std::optional<Tensor>& tensor, const AttentionArgs& args) {
  return {name, tensor ? *tensor : args.q};
}

void check_histories(const AttentionArgs& args) {
  const char* op = args.op;
  const Named k{"k", args.k};
  const Named v{"v", args.v};
  const Dim num_kv_heads{"H_kv", args.num_kv_heads()};
  const Dim head_dim{"D", args.q.size(3)};
  if (args.is_packed()) {
    const Dim num_rows{"T", args.k.size(0)};
    check_shape(op, k, {num_rows, num_kv_heads, head_dim});
    check_shape(op, v, {num_rows, num_kv_heads, head_dim});
    return;
  }
  const Dim num_users{"U", args.num_users()};
  const Dim num_keys{"S", args.k.size(1)};
  check_shape(op, k, {num_users, num_keys, num_kv_heads, head_dim});
  check_shape(op, v, {num_users, num_keys, num_kv_heads, head_dim});
}

void check_optional(const AttentionArgs& args) {
  const char* op = args.op;
  const Dim num_users{"U", args.num_users()};
  if (args.user_lengths) {
    const Named user_lengths{"user_lengths", *args.user_lengths};
    check_dtype(op, user_lengths, ScalarType::Int);
    check_rank(op, user_lengths, 1, "[U]");
    check_shape(op, user_lengths, {num_users});
  }
  if (args.cand_lengths) {
    const Named cand_lengths{"cand_lengths", *args.cand_lengths};
    check_dtype(op, cand_lengths, ScalarType::Int);
    check_rank(op, cand_lengths, 1, "[B]");
    check_shape(op, cand_lengths, {{"B", args.q.size(0)}});
  }
  if (args.user_mask) {
    const Named user_mask{"user_mask", *args.user_mask};
    check_dtype(op, user_mask, ScalarType::Bool);
    check_rank(op, user_mask, 2, "[U, S]");
    check_shape(op, user_mask, {num_users, {"S", args.k.size(1)}});
  }
}

}  // namespace

void check_attention(const AttentionArgs& args) {
  const char* op = args.op;
  const Named q{args.q_name, args.q};
  const Named k{"k", args.k};
  const Named v{"v", args.v};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  const Named user_offsets = named("user_offsets", args.user_offsets, args);
  check_devices(
      op,
      {q, k, v, cand_to_user, user_offsets, named("user_lengths", args.user_lengths, args),
       named("cand_lengths", args.cand_lengths, args), named("user_mask", args.user_mask, args)});
  check_float_dtypes(op, {q, k, v});
  check_dtype(op, cand_to_user, ScalarType::Int);
  const char* history = args.is_packed() ? "[T, H_kv, D]" : "[U, S, H_kv, D]";
  const int64_t rank = args.is_packed() ? 3 : 4;
  check_rank(op, q, 4, "[B, Q, H, D]");
  check_rank(op, k, rank, history);
  check_rank(op, v, rank, history);
  check_rank(op, cand_to_user, 1, "[B]");
  if (args.is_packed()) {
    check_dtype(op, user_offsets, ScalarType::Int);
    check_rank(op, user_offsets, 1, "[U + 1]");
    STD_TORCH_CHECK(args.num_users() >= 0, "ikbo::", op,
                    ": user_offsets must have U + 1 elements, at least 1; "
                    "got sizes [0]");
  }
  check_histories(args);
  check_shape(op, cand_to_user, {{"B", args.q.size(0)}});
  const int64_t num_heads = args.q.size(2);
  const int64_t num_kv_heads = args.num_kv_heads();
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "ikbo::", op,
                  ": H (= ", args.q_name, ".size(2)) must be a multiple of H_kv (= k.size(",
                  args.is_packed() ? 1 : 2, ")); got H = ", num_heads, ", H_kv = ", num_kv_heads);
  check_optional(args);
}

int64_t checked_longest_history(const Tensor& user_offsets, int64_t num_rows) {
  const int32_t* offsets = user_offsets.const_data_ptr<int32_t>();
  const int64_t num_users = user_offsets.numel() - 1;
  STD_TORCH_CHECK(
      offsets[0] == 0,
      "ikbo::target_attention: user_offsets must begin with 0; got user_offsets[0] = ", offsets[0]);
  int32_t longest = 0;
  for (int64_t u = 0; u < num_users; ++u) {
    STD_TORCH_CHECK(offsets[u + 1] >= offsets[u],
                    "ikbo::target_attention: user_offsets must never decrease; got user_offsets[",
                    u, "] = ", offsets[u], ", user_offsets[", u + 1, "] = ", offsets[u + 1]);
    longest = std::max(longest, offsets[u + 1] - offsets[u]);
  }
  STD_TORCH_CHECK(offsets[num_users] <= num_rows,
                  "ikbo::target_attention: user_offsets must end at T = ", num_rows,
                  " (= k.size(0)) at most; got user_offsets[", num_users,
                  "] = ", offsets[num_users]);
  return longest;
}

}  // namespace ikbo::ops
