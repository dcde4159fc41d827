// SPDX-License-Identifier: Apache-2.0
// The arguments of the schemas of ikbo::lce and their checks, shared by its devices.
#pragma once

#include <optional>
#include <vector>

#include "torch_ops/checks.h"
#include "torch_ops/packed_weight.h"

namespace ikbo::ops {

enum class LceForm { kOne, kList, kPrepacked };

// The arguments of each schema; a single e_cand is a list of one.
struct LceArgs {
  LceForm form = LceForm::kOne;
  const Tensor& e_user;
  const std::vector<Tensor>& e_cand;
  const Tensor& w_user;
  const Tensor& w_cand;
  const std::optional<Tensor>& bias;
  const Tensor& cand_to_user;
};

// Checked arguments as an implementation takes them; a plain weight is a matrix without an image.
struct LceCall {
  const Tensor& e_user;
  const std::vector<Tensor>& e_cand;
  const Tensor& w_user;
  PackedWeight w_cand;
  const std::optional<Tensor>& bias;
  const Tensor& cand_to_user;
};

// Devices, dtypes, ranks and shapes, and that a packed weight is of this call; index values are the
// kernel's. The result refers to the same tensors.
LceCall checked_lce(const LceArgs& args);

}  // namespace ikbo::ops
