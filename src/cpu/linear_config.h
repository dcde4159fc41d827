// SPDX-License-Identifier: Apache-2.0
// Which way ikbo::linear takes on the CPU. Pure: sizes and type in, choice out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace ikbo::cpu {

// Sizes of one call, as in the schema: x_user [U, K_user], x_cand [B, K_cand], result [B, M].
struct LinearSizes {
  int64_t num_users = 0;
  int64_t num_candidates = 0;
  int64_t m = 0;
  int64_t k_user = 0;
  int64_t k_cand = 0;
};

struct LinearConfig {
  // True: rows_per_block candidate rows at a time are converted to fp32, multiplied there and
  // rounded once. False: the user's row is gathered into the result and the candidate product is
  // added to it by one GEMM.
  bool is_upcast = false;
  int64_t rows_per_block = 0;
};

// 256 rows of K_cand about 1000 in fp32 are 1 MB, the L2 cache of one core, and already give
// PyTorch's GEMM its full speed.
inline constexpr int64_t kUpcastRows = 256;

inline LinearConfig select_linear_config(const LinearSizes& sizes, bool is_16_bit) {
  if (is_16_bit) {
    return {.is_upcast = true, .rows_per_block = std::min(kUpcastRows, sizes.num_candidates)};
  }
  return {.is_upcast = false, .rows_per_block = sizes.num_candidates};
}

inline std::string to_string(const LinearConfig& config) {
  return config.is_upcast ? "cpu_upcast_gemm" : "cpu_gather_gemm";
}

}  // namespace ikbo::cpu
