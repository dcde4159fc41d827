// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "cpu/aten.h"

namespace ikbo::cpu {

// ikbo::lce on the CPU; arguments as in the schema, already checked but for the index values.
Tensor lce(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user, const Tensor& w_cand,
           const std::optional<Tensor>& bias, const Tensor& cand_to_user);

}  // namespace ikbo::cpu
