// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/attention_args.h"

namespace ikbo::ops {

void check_attention(const AttentionArgs& args) {
  constexpr const char* kOp = "target_attention";
  const Named q{"q", args.q};
  const Named k{"k", args.k};
  const Named v{"v", args.v};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  // An absent tensor stands for q on q's device, and is not looked at again.
  const Named user_lengths{"user_lengths", args.user_lengths ? *args.user_lengths : args.q};
  const Named cand_lengths{"cand_lengths", args.cand_lengths ? *args.cand_lengths : args.q};
  const Named user_mask{"user_mask", args.user_mask ? *args.user_mask : args.q};
  check_devices(kOp, {q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask});
  check_float_dtypes(kOp, {q, k, v});
  check_dtype(kOp, cand_to_user, ScalarType::Int);
  check_rank(kOp, q, 4, "[B, Q, H, D]");
  check_rank(kOp, k, 4, "[U, S, H_kv, D]");
  check_rank(kOp, v, 4, "[U, S, H_kv, D]");
  check_rank(kOp, cand_to_user, 1, "[B]");
  const Dim num_candidates{"B", args.q.size(0)};
  const Dim num_users{"U", args.k.size(0)};
  const Dim num_keys{"S", args.k.size(1)};
  const Dim num_kv_heads{"H_kv", args.k.size(2)};
  const Dim head_dim{"D", args.q.size(3)};
  check_shape(kOp, k, {num_users, num_keys, num_kv_heads, head_dim});
  check_shape(kOp, v, {num_users, num_keys, num_kv_heads, head_dim});
  check_shape(kOp, cand_to_user, {num_candidates});
  const int64_t num_heads = args.q.size(2);
  STD_TORCH_CHECK(num_kv_heads.size > 0 && num_heads % num_kv_heads.size == 0,
                  "ikbo::target_attention: H (= q.size(2)) must be a multiple of H_kv "
                  "(= k.size(2)); got H = ",
                  num_heads, ", H_kv = ", num_kv_heads.size);
  if (args.user_lengths) {
    check_dtype(kOp, user_lengths, ScalarType::Int);
    check_rank(kOp, user_lengths, 1, "[U]");
    check_shape(kOp, user_lengths, {num_users});
  }
  if (args.cand_lengths) {
    check_dtype(kOp, cand_lengths, ScalarType::Int);
    check_rank(kOp, cand_lengths, 1, "[B]");
    check_shape(kOp, cand_lengths, {num_candidates});
  }
  if (args.user_mask) {
    check_dtype(kOp, user_mask, ScalarType::Bool);
    check_rank(kOp, user_mask, 2, "[U, S]");
    check_shape(kOp, user_mask, {num_users, num_keys});
  }
}

}  // namespace ikbo::ops
