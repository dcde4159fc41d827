// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/aten.h"

namespace ikbo::cpu {

// ikbo::bmm on the CPU with both transposes already applied as views: a_user [U, P, R], b_cand
// [B, R, N]. Checked but for the index values.
Tensor bmm(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user);

}  // namespace ikbo::cpu
