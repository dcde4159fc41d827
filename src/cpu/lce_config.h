// SPDX-License-Identifier: Apache-2.0
// Which way ikbo::lce takes on the CPU. Pure: sizes and type in, choice out.
#pragma once

#include "cpu/batched_gemm.h"

namespace ikbo::cpu {

// Sizes of one call, as in the schema: e_user [U, K_user, N], e_cand [B, K_cand, N], result
// [B, M, N].
struct LceSizes {
  int64_t num_users = 0;
  int64_t num_candidates = 0;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k_user = 0;
  int64_t k_cand = 0;
};

inline BatchedGemmConfig select_lce_config(const LceSizes& sizes, bool is_16_bit) {
  return select_batched_gemm_config(sizes.m, sizes.k_cand, sizes.n, is_16_bit);
}

}  // namespace ikbo::cpu
