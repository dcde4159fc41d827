// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix instructions: D[64, kN] (fp32, registers) += A[64, 16] * B[kN, 16]^T, A and B in
// shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ikbo::device {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of the accumulators across asynchronous instructions.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Matrix descriptors of operand tiles in shared memory that start at a multiple of 1024 B.
// MN-major, 128-byte swizzle: a row is 64 n of one k; atoms of 8 rows follow each other every 1024
// B; the next 16 k lie 2048 B further (descriptor + kWgmmaStepMnMajor).
__device__ __forceinline__ std::uint64_t wgmma_descriptor_mn_major(std::uint32_t s_tile) {
  constexpr std::uint64_t kSwizzle128B = std::uint64_t{1} << 62;
  constexpr std::uint64_t kAtomStride = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kLeadingUnused = std::uint64_t{1} << 16;
  return kSwizzle128B | kAtomStride | kLeadingUnused | ((s_tile & 0x3FFFF) >> 4);
}

// K-major, 64-byte swizzle: a row is 32 k of one m; atoms of 8 rows follow each other every 512 B;
// the next 16 k lie 32 B further (descriptor + kWgmmaStepKMajor).
__device__ __forceinline__ std::uint64_t wgmma_descriptor_k_major(std::uint32_t s_tile) {
  constexpr std::uint64_t kSwizzle64B = std::uint64_t{2} << 62;
  constexpr std::uint64_t kAtomStride = std::uint64_t{512 >> 4} << 32;
  constexpr std::uint64_t kLeadingUnused = std::uint64_t{1} << 16;
  return kSwizzle64B | kAtomStride | kLeadingUnused | ((s_tile & 0x3FFFF) >> 4);
}

// K-major, 128-byte swizzle: a row is 64 k of one m; atoms of 8 rows follow each other every 1024
// B; the next 16 k lie 32 B further (descriptor + kWgmmaStepKMajor). The fields are those of
// MN-major.
__device__ __forceinline__ std::uint64_t wgmma_descriptor_k_major_128b(std::uint32_t s_tile) {
  return wgmma_descriptor_mn_major(s_tile);
}

inline constexpr int kWgmmaStepKMajor = 2;     // descriptor units of 16 B per 16 k
inline constexpr int kWgmmaStepMnMajor = 128;  // likewise

#define IKBO_WGMMA_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define IKBO_WGMMA_NAMES_1 \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define IKBO_WGMMA_NAMES_2 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define IKBO_WGMMA_NAMES_3 \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define IKBO_WGMMA_NAMES_4 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define IKBO_WGMMA_NAMES_5 \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define IKBO_WGMMA_NAMES_6 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define IKBO_WGMMA_NAMES_7 \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define IKBO_WGMMA_REGS_0                                                                         \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),    \
      "+f"(d[15])
#define IKBO_WGMMA_REGS_1                                                                        \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),     \
      "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
      "+f"(d[30]), "+f"(d[31])
#define IKBO_WGMMA_REGS_2                                                                        \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]),     \
      "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), \
      "+f"(d[46]), "+f"(d[47])
#define IKBO_WGMMA_REGS_3                                                                        \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),     \
      "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), \
      "+f"(d[62]), "+f"(d[63])
#define IKBO_WGMMA_REGS_4                                                                        \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),     \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), \
      "+f"(d[78]), "+f"(d[79])
#define IKBO_WGMMA_REGS_5                                                                        \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]),     \
      "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), \
      "+f"(d[94]), "+f"(d[95])
#define IKBO_WGMMA_REGS_6                                                                       \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), \
      "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]),       \
      "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define IKBO_WGMMA_REGS_7                                                                 \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]),     \
      "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), \
      "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define IKBO_WGMMA_NAMES_TO_1 IKBO_WGMMA_NAMES_0
#define IKBO_WGMMA_REGS_TO_1 IKBO_WGMMA_REGS_0
#define IKBO_WGMMA_NAMES_TO_2 IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1
#define IKBO_WGMMA_REGS_TO_2 IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1
#define IKBO_WGMMA_NAMES_TO_3 IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1 ", " IKBO_WGMMA_NAMES_2
#define IKBO_WGMMA_REGS_TO_3 IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1, IKBO_WGMMA_REGS_2
#define IKBO_WGMMA_NAMES_TO_4 \
  IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1 ", " IKBO_WGMMA_NAMES_2 ", " IKBO_WGMMA_NAMES_3
#define IKBO_WGMMA_REGS_TO_4 \
  IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1, IKBO_WGMMA_REGS_2, IKBO_WGMMA_REGS_3
#define IKBO_WGMMA_NAMES_TO_5                                                                \
  IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1 ", " IKBO_WGMMA_NAMES_2 ", " IKBO_WGMMA_NAMES_3 \
                     ", " IKBO_WGMMA_NAMES_4
#define IKBO_WGMMA_REGS_TO_5 \
  IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1, IKBO_WGMMA_REGS_2, IKBO_WGMMA_REGS_3, IKBO_WGMMA_REGS_4
#define IKBO_WGMMA_NAMES_TO_6                                                                \
  IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1 ", " IKBO_WGMMA_NAMES_2 ", " IKBO_WGMMA_NAMES_3 \
                     ", " IKBO_WGMMA_NAMES_4 ", " IKBO_WGMMA_NAMES_5
#define IKBO_WGMMA_REGS_TO_6                                                                     \
  IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1, IKBO_WGMMA_REGS_2, IKBO_WGMMA_REGS_3, IKBO_WGMMA_REGS_4, \
      IKBO_WGMMA_REGS_5
#define IKBO_WGMMA_NAMES_TO_7                                                                \
  IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1 ", " IKBO_WGMMA_NAMES_2 ", " IKBO_WGMMA_NAMES_3 \
                     ", " IKBO_WGMMA_NAMES_4 ", " IKBO_WGMMA_NAMES_5 ", " IKBO_WGMMA_NAMES_6
#define IKBO_WGMMA_REGS_TO_7                                                                     \
  IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1, IKBO_WGMMA_REGS_2, IKBO_WGMMA_REGS_3, IKBO_WGMMA_REGS_4, \
      IKBO_WGMMA_REGS_5, IKBO_WGMMA_REGS_6
#define IKBO_WGMMA_NAMES_TO_8                                                                \
  IKBO_WGMMA_NAMES_0 ", " IKBO_WGMMA_NAMES_1 ", " IKBO_WGMMA_NAMES_2 ", " IKBO_WGMMA_NAMES_3 \
                     ", " IKBO_WGMMA_NAMES_4 ", " IKBO_WGMMA_NAMES_5 ", " IKBO_WGMMA_NAMES_6 \
                     ", " IKBO_WGMMA_NAMES_7
#define IKBO_WGMMA_REGS_TO_8                                                                     \
  IKBO_WGMMA_REGS_0, IKBO_WGMMA_REGS_1, IKBO_WGMMA_REGS_2, IKBO_WGMMA_REGS_3, IKBO_WGMMA_REGS_4, \
      IKBO_WGMMA_REGS_5, IKBO_WGMMA_REGS_6, IKBO_WGMMA_REGS_7

// A is MN-major (transposed) or K-major, B is K-major. `accumulate` == 0 overwrites D.
#define IKBO_WGMMA(n, chunks, type, a_index, b_index, p_index, t_index)            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_index                       \
               ", 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type     \
               " {" IKBO_WGMMA_NAMES_TO_##chunks "}, %" #a_index ", %" #b_index    \
                                                 ", p, 1, 1, %" #t_index ", 0;\n}" \
               : IKBO_WGMMA_REGS_TO_##chunks                                       \
               : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate), "n"(kIsMnMajorA ? 1 : 0))

template <typename Element, int kN, bool kIsMnMajorA = true>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[kN / 2], std::uint64_t descriptor_a,
                                             std::uint64_t descriptor_b, int accumulate) {
  constexpr bool kIsHalf = std::is_same_v<Element, __half>;
  static_assert(kIsHalf || std::is_same_v<Element, __nv_bfloat16>);
  if constexpr (kN == 64) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(64, 2, "f16", 32, 33, 34, 35);
    } else {
      IKBO_WGMMA(64, 2, "bf16", 32, 33, 34, 35);
    }
  } else if constexpr (kN == 96) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(96, 3, "f16", 48, 49, 50, 51);
    } else {
      IKBO_WGMMA(96, 3, "bf16", 48, 49, 50, 51);
    }
  } else if constexpr (kN == 128) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(128, 4, "f16", 64, 65, 66, 67);
    } else {
      IKBO_WGMMA(128, 4, "bf16", 64, 65, 66, 67);
    }
  } else if constexpr (kN == 160) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(160, 5, "f16", 80, 81, 82, 83);
    } else {
      IKBO_WGMMA(160, 5, "bf16", 80, 81, 82, 83);
    }
  } else if constexpr (kN == 192) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(192, 6, "f16", 96, 97, 98, 99);
    } else {
      IKBO_WGMMA(192, 6, "bf16", 96, 97, 98, 99);
    }
  } else if constexpr (kN == 224) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(224, 7, "f16", 112, 113, 114, 115);
    } else {
      IKBO_WGMMA(224, 7, "bf16", 112, 113, 114, 115);
    }
  } else if constexpr (kN == 256) {
    if constexpr (kIsHalf) {
      IKBO_WGMMA(256, 8, "f16", 128, 129, 130, 131);
    } else {
      IKBO_WGMMA(256, 8, "bf16", 128, 129, 130, 131);
    }
  } else {
    static_assert(kN == 64, "kN must be 64, 96, 128, 160, 192, 224 or 256");
  }
}

#undef IKBO_WGMMA

}  // namespace ikbo::device
