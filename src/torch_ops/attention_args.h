// SPDX-License-Identifier: Apache-2.0
// The arguments of ikbo::target_attention and their checks, shared by its CPU kernel and composite.
#pragma once

#include <optional>

#include "torch_ops/checks.h"

namespace ikbo::ops {

struct AttentionArgs {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& cand_to_user;
  const std::optional<Tensor>& user_lengths;
  const std::optional<Tensor>& cand_lengths;
  const std::optional<Tensor>& user_mask;
  const std::optional<double>& scale;
};

// Devices, dtypes, ranks and shapes; index values and lengths are the kernel's.
void check_attention(const AttentionArgs& args);

}  // namespace ikbo::ops
