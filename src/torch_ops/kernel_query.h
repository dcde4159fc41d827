// SPDX-License-Identifier: Apache-2.0
// What ikbo::_select_kernel is asked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ikbo::ops {

struct KernelQuery {
  std::string dtype;
  int64_t num_users = 0;
  int64_t num_candidates = 0;
  std::vector<int64_t> dims;
  // Where the operands lie, as the CUDA kernels' choices depend on it; empty: all are contiguous
  // and aligned. Per operand: elements between an aligned address and the first one, then strides
  // (-1 each: a packed weight).
  //   bmm     a_user, b_cand, then transpose_a and transpose_b
  //   linear  x_user, x_cand, w_user, w_cand
  //   lce     e_user, w_user, w_cand, then each e_cand, which K_i precedes
  //   target_attention, target_attention.packed
  //           q, k, v, then whether there is a user_mask, and whether scale is positive
  //   self_target_attention
  //           q_user, q_cand, k, v, then whether scale is positive
  std::vector<int64_t> layout;

  bool is_16_bit() const { return dtype == "float16" || dtype == "bfloat16"; }
};

// The kernel that `op` takes on the current CUDA device; "composite" where it has none.
std::string select_cuda_kernel(const std::string& op, const KernelQuery& query);

}  // namespace ikbo::ops
