// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/self_attention_args.h"

#include <limits>

namespace ikbo::ops {

AttentionArgs cand_part(const SelfArgs& args) {
  return {.q = args.q_cand,
          .k = args.k,
          .v = args.v,
          .cand_to_user = args.cand_to_user,
          .user_lengths = args.user_lengths,
          .cand_lengths = args.cand_lengths,
          .user_mask = kNoTensor,
          .scale = args.scale,
          .op = kSelfOp,
          .q_name = "q_cand"};
}

void check_self(const SelfArgs& args) {
  const Named q_user{"q_user", args.q_user};
  check_devices(kSelfOp, {{"q_cand", args.q_cand}, q_user});
  check_attention(cand_part(args));
  check_float_dtypes(kSelfOp, {{"q_cand", args.q_cand}, q_user});
  check_rank(kSelfOp, q_user, 4, "[U, S, H, D]");
  check_shape(kSelfOp, q_user,
              {{"U", args.num_users()},
               {"S", args.num_keys()},
               {"H", args.num_heads()},
               {"D", args.head_dim()}});
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t rows = (args.num_history_rows() + args.num_cand_rows()) * args.num_heads();
  STD_TORCH_CHECK(rows <= kMax, "ikbo::", kSelfOp, ": (U * S + B * Q) * H must be at most ", kMax,
                  "; got ", rows, "; split the users over several calls");
}

}  // namespace ikbo::ops
