// SPDX-License-Identifier: Apache-2.0
// Reading the user's row by index: the step that every CPU operator shares.
#pragma once

#include "cpu/aten.h"

namespace ikbo::cpu {

// Throws, naming the operator, the first bad row and its value, unless every element of
// `cand_to_user` (int32 [B], any stride) lies in [0, num_users). Returns it contiguous.
Tensor checked_index(const char* op, const Tensor& cand_to_user, int64_t num_users);

// dst[b] = src[cand_to_user[b]]. dst [B, ...] contiguous; src [U, ...], each of its rows
// contiguous; same dtype; cand_to_user from checked_index.
void gather_user_rows(const Tensor& dst, const Tensor& src, const Tensor& cand_to_user);

}  // namespace ikbo::cpu
