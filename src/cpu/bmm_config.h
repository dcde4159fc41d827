// SPDX-License-Identifier: Apache-2.0
// Which way ikbo::bmm takes on the CPU. Pure: sizes and type in, choice out.
#pragma once

#include "cpu/batched_gemm.h"

namespace ikbo::cpu {

// Sizes of one call after the transposes: a_user [U, P, R], b_cand [B, R, N], result [B, P, N].
struct BmmSizes {
  int64_t num_users = 0;
  int64_t num_candidates = 0;
  int64_t p = 0;
  int64_t r = 0;
  int64_t n = 0;
};

inline BatchedGemmConfig select_bmm_config(const BmmSizes& sizes, bool is_16_bit) {
  return select_batched_gemm_config(sizes.p, sizes.r, sizes.n, is_16_bit);
}

}  // namespace ikbo::cpu
