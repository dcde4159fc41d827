// SPDX-License-Identifier: Apache-2.0
// The two products of target_attention_generic in fp32, by plain multiply-adds. A warp has 16 rows;
// of each, eight lanes hold the logits and the output.
#pragma once

#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

// `v` += a . b, from the first element on.
__device__ __forceinline__ void add_product(float& v, const float4& a, const float4& b) {
  v = fmaf(a.x, b.x, v);
  v = fmaf(a.y, b.y, v);
  v = fmaf(a.z, b.z, v);
  v = fmaf(a.w, b.w, v);
}

// The members are those of MmaEngine.
template <int kHeadDimT>
struct SimtEngine {
  using Element = float;
  using Word = float;
  static constexpr int kHeadDim = kHeadDimT;
  static constexpr int kKeyBlock = generic_key_block_of(kHeadDim * static_cast<int>(sizeof(Word)));
  // An odd number of 16 bytes: reads of eight rows hit all banks.
  static constexpr int kPitch = kHeadDim + 4;
  static constexpr int kCtasPerSm = 2;

  static constexpr int kRows = 4;
  static constexpr int kLanesOfRow = 8;
  static constexpr int kKeys = kKeyBlock / kLanesOfRow;
  static constexpr int kColumns = kHeadDim / kLanesOfRow;
  static constexpr int kVector = 4;

  template <int kOfLane>
  struct Rows {
    float v[kRows][kOfLane] = {};

    __device__ __forceinline__ float& at(int row, int i) { return v[row][i]; }
  };
  using Logits = Rows<kKeys>;
  using Outputs = Rows<kColumns>;

  static __device__ __forceinline__ int row_of(int lane, int i) { return lane / 8 + 4 * i; }
  static __device__ __forceinline__ int first_key(int lane) { return lane % 8; }
  static __device__ __forceinline__ int first_column(int lane) { return lane % 8 * kVector; }
  static constexpr __device__ int key_step(int i) { return 8 * i; }
  static constexpr __device__ int column_step(int i) {
    return i / kVector * kLanesOfRow * kVector + i % kVector;
  }

  static __device__ __forceinline__ float exp2(float x) { return exp2f(x); }

  static __device__ __forceinline__ const float4& vector_at(const Word* s_element) {
    return *reinterpret_cast<const float4*>(s_element);
  }

  static __device__ __forceinline__ void multiply_keys(Logits& logits, const Word* s_q,
                                                       const Word* s_k, int lane) {
#pragma unroll 2
    for (int d = 0; d < kHeadDim; d += 4) {
      float4 q[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) q[i] = vector_at(s_q + row_of(lane, i) * kPitch + d);
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const float4 k = vector_at(s_k + (first_key(lane) + key_step(j)) * kPitch + d);
#pragma unroll
        for (int i = 0; i < kRows; ++i) add_product(logits.v[i][j], q[i], k);
      }
    }
  }

  static __device__ __forceinline__ void multiply_values(Outputs& out, const Logits& weights,
                                                         const Word* s_v, int lane) {
    const Word* s_column = s_v + first_column(lane);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
#pragma unroll 2
      for (int holder = 0; holder < kLanesOfRow; ++holder) {  // of the key's weights
        float w[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          w[i] = __shfl_sync(~0u, weights.v[i][j], lane / kLanesOfRow * kLanesOfRow + holder);
        }
        const Word* s_key = s_column + (key_step(j) + holder) * kPitch;
#pragma unroll
        for (int c = 0; c < kColumns; c += kVector) {
          const float4 v = vector_at(s_key + column_step(c));
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            out.v[i][c] = fmaf(w[i], v.x, out.v[i][c]);
            out.v[i][c + 1] = fmaf(w[i], v.y, out.v[i][c + 1]);
            out.v[i][c + 2] = fmaf(w[i], v.z, out.v[i][c + 2]);
            out.v[i][c + 3] = fmaf(w[i], v.w, out.v[i][c + 3]);
          }
        }
      }
    }
  }
};

}  // namespace ikbo::target_attention_impl
