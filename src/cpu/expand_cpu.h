// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/aten.h"

namespace ikbo::cpu {

// ikbo::expand on the CPU; arguments as in the schema, already checked but for the index values.
Tensor expand(const Tensor& x_user, const Tensor& cand_to_user);

}  // namespace ikbo::cpu
