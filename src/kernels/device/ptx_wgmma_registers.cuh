// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix instructions with A in registers and B MN-major in shared memory:
// D[64, kN] (fp32, registers) += A[64, 16] B[16, kN].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include "kernels/device/ptx_wgmma.cuh"

namespace ikbo::device {

// B of several atoms of 64 n: they follow each other every `atom_bytes`; 8 k follow each other
// every 1024 B. The next 16 k lie 2048 B further (descriptor + kWgmmaStepMnMajor).
__device__ __forceinline__ std::uint64_t wgmma_descriptor_mn_major_wide(std::uint32_t s_tile,
                                                                        int atom_bytes) {
  constexpr std::uint64_t kSwizzle128B = std::uint64_t{1} << 62;
  constexpr std::uint64_t kStepOf8K = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128B | kStepOf8K | (static_cast<std::uint64_t>(atom_bytes >> 4) << 16) |
         ((s_tile & 0x3FFFF) >> 4);
}

#define IKBO_WGMMA_RS(n, chunks, type, a0, a1, a2, a3, b_index, p_index)                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_index                               \
               ", 0;\n"                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type             \
               " {" IKBO_WGMMA_NAMES_TO_##chunks "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
                                                 "}, %" #b_index ", p, 1, 1, 1;\n}"        \
               : IKBO_WGMMA_REGS_TO_##chunks                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_b), "r"(accumulate))

#define IKBO_WGMMA_RS_TYPES(n, chunks, a0, a1, a2, a3, b_index, p_index) \
  if constexpr (std::is_same_v<Element, __half>) {                       \
    IKBO_WGMMA_RS(n, chunks, "f16", a0, a1, a2, a3, b_index, p_index);   \
  } else {                                                               \
    static_assert(std::is_same_v<Element, __nv_bfloat16>);               \
    IKBO_WGMMA_RS(n, chunks, "bf16", a0, a1, a2, a3, b_index, p_index);  \
  }

// `a` holds this thread's part of A: rows t / 4 and t / 4 + 8 of its warp's 16, k as the
// accumulators of the columns are held. `accumulate` == 0 overwrites D.
template <typename Element, int kN>
__device__ __forceinline__ void wgmma_m64k16_registers(float (&d)[kN / 2],
                                                       const std::uint32_t (&a)[4],
                                                       std::uint64_t descriptor_b, int accumulate) {
  if constexpr (kN == 32) {
    IKBO_WGMMA_RS_TYPES(32, 1, 16, 17, 18, 19, 20, 21)
  } else if constexpr (kN == 64) {
    IKBO_WGMMA_RS_TYPES(64, 2, 32, 33, 34, 35, 36, 37)
  } else if constexpr (kN == 96) {
    IKBO_WGMMA_RS_TYPES(96, 3, 48, 49, 50, 51, 52, 53)
  } else if constexpr (kN == 128) {
    IKBO_WGMMA_RS_TYPES(128, 4, 64, 65, 66, 67, 68, 69)
  } else if constexpr (kN == 192) {
    IKBO_WGMMA_RS_TYPES(192, 6, 96, 97, 98, 99, 100, 101)
  } else {
    static_assert(kN == 256, "kN must be 32, 64, 96, 128, 192 or 256");
    IKBO_WGMMA_RS_TYPES(256, 8, 128, 129, 130, 131, 132, 133)
  }
}

#undef IKBO_WGMMA_RS_TYPES
#undef IKBO_WGMMA_RS

}  // namespace ikbo::device
