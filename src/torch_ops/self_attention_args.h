// SPDX-License-Identifier: Apache-2.0
// The arguments of ikbo::self_target_attention and their checks, for the implementations of every
// device.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>

#include "torch_ops/attention_args.h"

namespace ikbo::ops {

inline constexpr const char* kSelfOp = "self_target_attention";

// (out_user, out_cand, lse_user, lse_cand), or gradients of them; in the backward pass' result
// gradients of (q_user, q_cand, k, v).
using SelfResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct SelfArgs {
  const Tensor& q_user;
  const Tensor& q_cand;
  const Tensor& k;
  const Tensor& v;
  const Tensor& cand_to_user;
  const std::optional<Tensor>& user_lengths;
  const std::optional<Tensor>& cand_lengths;
  bool is_causal;
  const std::optional<double>& scale;

  int64_t num_users() const { return k.size(0); }
  int64_t num_keys() const { return k.size(1); }
  int64_t num_history_rows() const { return num_users() * num_keys(); }
  int64_t num_cand_rows() const { return q_cand.size(0) * q_cand.size(1); }
  int64_t num_heads() const { return q_cand.size(2); }
  int64_t head_dim() const { return q_cand.size(3); }
};

AttentionArgs cand_part(const SelfArgs& args);

// Devices, dtypes, ranks and shapes; index values and lengths are the kernel's.
void check_self(const SelfArgs& args);

// The values of a list, contiguous in `dense`; nullptr where there is none.
inline const int32_t* list_data(const std::optional<Tensor>& list, std::optional<Tensor>& dense) {
  if (!list) return nullptr;
  dense = torch::stable::contiguous(*list);
  return dense->const_data_ptr<int32_t>();
}

}  // namespace ikbo::ops
