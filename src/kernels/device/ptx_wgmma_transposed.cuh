// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix instructions with B MN-major, both operands in shared memory:
// D[64, kN] (fp32, registers) += A[64, 16] B[16, kN]. Descriptor of B:
// wgmma_descriptor_mn_major_wide (ptx_wgmma_registers.cuh). And the descriptor of an operand whose
// rows are narrow.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include "kernels/device/ptx_wgmma.cuh"

namespace ikbo::device {

// MN-major in chunks of `row` = 64, 32 or 16 n, `chunk_bytes` apart: rows of 2 row bytes of one k,
// swizzled over as many bytes; the next 16 k lie 32 row bytes further (descriptor + 2 row).
__device__ __forceinline__ std::uint64_t wgmma_descriptor_mn_major_chunks(std::uint32_t s_tile,
                                                                          int row,
                                                                          int chunk_bytes) {
  const std::uint64_t swizzle = row == 64 ? 1 : row == 32 ? 2 : 3;
  return swizzle << 62 | static_cast<std::uint64_t>(row) << 32 |
         static_cast<std::uint64_t>(chunk_bytes >> 4) << 16 | ((s_tile & 0x3FFFF) >> 4);
}

#define IKBO_WGMMA_T(n, chunks, type, a_index, b_index, p_index, t_index)          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_index                       \
               ", 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type     \
               " {" IKBO_WGMMA_NAMES_TO_##chunks "}, %" #a_index ", %" #b_index    \
                                                 ", p, 1, 1, %" #t_index ", 1;\n}" \
               : IKBO_WGMMA_REGS_TO_##chunks                                       \
               : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate), "n"(kIsMnMajorA ? 1 : 0))

#define IKBO_WGMMA_T_TYPES(n, chunks, a_index, b_index, p_index, t_index) \
  if constexpr (std::is_same_v<Element, __half>) {                        \
    IKBO_WGMMA_T(n, chunks, "f16", a_index, b_index, p_index, t_index);   \
  } else {                                                                \
    static_assert(std::is_same_v<Element, __nv_bfloat16>);                \
    IKBO_WGMMA_T(n, chunks, "bf16", a_index, b_index, p_index, t_index);  \
  }

// A is MN-major (transposed) or K-major. `accumulate` == 0 overwrites D.
template <typename Element, int kN, bool kIsMnMajorA>
__device__ __forceinline__ void wgmma_m64k16_transposed(float (&d)[kN / 2],
                                                        std::uint64_t descriptor_a,
                                                        std::uint64_t descriptor_b,
                                                        int accumulate) {
  if constexpr (kN == 64) {
    IKBO_WGMMA_T_TYPES(64, 2, 32, 33, 34, 35)
  } else if constexpr (kN == 128) {
    IKBO_WGMMA_T_TYPES(128, 4, 64, 65, 66, 67)
  } else if constexpr (kN == 192) {
    IKBO_WGMMA_T_TYPES(192, 6, 96, 97, 98, 99)
  } else {
    static_assert(kN == 256, "kN must be 64, 128, 192 or 256");
    IKBO_WGMMA_T_TYPES(256, 8, 128, 129, 130, 131)
  }
}

#undef IKBO_WGMMA_T_TYPES
#undef IKBO_WGMMA_T

}  // namespace ikbo::device
