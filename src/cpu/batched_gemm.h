// SPDX-License-Identifier: Apache-2.0
// One small GEMM per item, over all threads, with operands picked by index instead of replicated:
// the common core of lce and bmm.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/aten.h"

namespace ikbo::cpu {

struct BatchedGemmConfig {
  // True: the operand b is converted to fp32 and the result rounded from fp32, a few items at a
  // time.
  bool is_upcast = false;
  // At most this many items that share their matrix a go into one call of PyTorch's batched GEMM.
  int64_t items_per_call = 1;
};

// A call should at least move this much, or its own cost (a few us) shows; and at most the share of
// an L2 cache in which what the call gathers and converts stays until it is used.
inline constexpr int64_t kCallBytes = 128 * 1024;
// In place nothing is gathered; a call over several items prepares the matrix that they share once.
inline constexpr int64_t kInPlaceCallBytes = 4 * 1024 * 1024;

// a [m, k], b [k, n] of each item.
inline BatchedGemmConfig select_batched_gemm_config(int64_t m, int64_t k, int64_t n,
                                                    bool is_16_bit) {
  const int64_t item_bytes = std::max<int64_t>(1, (k + m) * n * 4);
  const int64_t call_bytes = is_16_bit ? kCallBytes : kInPlaceCallBytes;
  return {.is_upcast = is_16_bit, .items_per_call = std::max<int64_t>(1, call_bytes / item_bytes)};
}

inline std::string to_string(const BatchedGemmConfig& config) {
  return config.is_upcast ? "cpu_upcast_batched_gemm" : "cpu_batched_gemm";
}

// Item i uses matrix index[i] of [*, rows, columns], or matrix 0 where index is null.
struct PickedMatrices {
  Tensor matrices;
  const int32_t* index = nullptr;
};

// out[i] = init[i] + a[i] @ b[i]; without init, out[i] = a[i] @ b[i]. b[i] [k, n] is given in parts
// [items, k_p, n], one at least, that lie on top of each other; they are not joined, but for the
// few items that are converted at a time. out [items, m, n] contiguous, dtype of b. a [*, m, k]
// (any strides) and init (contiguous matrices) are in sum_dtype of it: sums are taken there and
// rounded once.
void batched_gemm(const Tensor& out, const PickedMatrices* init, const PickedMatrices& a,
                  const std::vector<Tensor>& b, const BatchedGemmConfig& config);

}  // namespace ikbo::cpu
