// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "cpu/aten.h"

namespace ikbo::cpu {

// ikbo::lce on the CPU; arguments as in the schemas, already checked but for the index values.
// e_cand has one part at least; w_cand [M, K_cand] is in their dtype or in sum_dtype of it.
Tensor lce(const Tensor& e_user, const std::vector<Tensor>& e_cand, const Tensor& w_user,
           const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user);

}  // namespace ikbo::cpu
