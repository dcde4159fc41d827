// SPDX-License-Identifier: Apache-2.0
// Matrices of 16-bit elements from registers to shared memory, transposed; sm_90 and newer.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
#pragma once

#include <cstdint>

namespace ikbo::device {

// Four 8 x 8 matrices, each transposed; lane l names row l % 8 of the stored matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t s_row, std::uint32_t m0,
                                                          std::uint32_t m1, std::uint32_t m2,
                                                          std::uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

}  // namespace ikbo::device
