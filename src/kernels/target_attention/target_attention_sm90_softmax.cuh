// SPDX-License-Identifier: Apache-2.0
// Online softmax of one consumer warpgroup: a thread holds rows t / 4 and t / 4 + 8 of its warp's
// 16, and of each 8 keys the two from t % 4 * 2 on.
#pragma once

#include <cstdint>

#include "kernels/device/round_pair.cuh"

namespace ikbo::target_attention_impl {

using device::round_pair;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four threads that share a row.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Weights are exp2(logit * scale_log2 - shift). A shift near the largest logit would do as well as
// the largest: it moves only where a weight would grow out of range, so that most blocks need
// neither a maximum nor a correction of what was summed up. A row moves by its own logits alone.
template <typename Element, int kKeyBlock>
struct OnlineSoftmax {
  static constexpr float kMinusInfinity = -__builtin_huge_valf();
  static constexpr float kMaxSum = 16384;  // of a thread's weights of a block: fp16 ends at 65504
  using Logits = float[kKeyBlock / 2];
  using Weights = std::uint32_t[kKeyBlock / 16][4];

  float scale_log2;  // positive
  float shift[2] = {kMinusInfinity, kMinusInfinity};
  float sum[2] = {0, 0};     // of this thread's keys
  float factor[2] = {1, 1};  // what sums of earlier blocks are to be multiplied by

  // Keys at and past a row's limit, counted from the block's first, are absent.
  __device__ __forceinline__ static void mask(Logits& s, const int (&limit)[2], int thread) {
    const int end[2] = {limit[0] - thread % 4 * 2, limit[1] - thread % 4 * 2};
#pragma unroll
    for (int j = 0; j < kKeyBlock / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (j * 8 + e % 2 >= end[e / 2]) s[4 * j + e] = kMinusInfinity;
      }
    }
  }

  // A new row begins with this block. A quarter of the keys, the first among them, says well
  // enough where the shift has to be.
  __device__ __forceinline__ void begin(const Logits& s, float scale) {
    *this = {.scale_log2 = scale};
    for (int row = 0; row < 2; ++row) shift[row] = max_of_row<4>(s, row) * scale_log2;
  }

  // The next block. Returns, alike in all threads of a warp, whether any factor is not 1.
  __device__ __forceinline__ bool step(const Logits& s, Weights& p) {
    float total[2];
    weigh(s, p, total);
    const bool grows[2] = {!(total[0] <= kMaxSum), !(total[1] <= kMaxSum)};
    const bool moves = __any_sync(~0u, grows[0] || grows[1]);
    if (moves) {
      move_shift(s, grows);
      weigh(s, p, total);
    }
    for (int row = 0; row < 2; ++row) sum[row] += total[row];
    return moves;
  }

 private:
  // The weights, rounded as operand A of the multiplication with V, and their sums.
  __device__ __forceinline__ void weigh(const Logits& s, Weights& p, float (&total)[2]) const {
    // Two chains a row: one alone would wait for itself.
    float chain[2][2] = {};
    // A row without a key so far: every weight is exp2(-inf - 0) = 0.
    const float subtracted[2] = {shift[0] == kMinusInfinity ? 0.0f : shift[0],
                                 shift[1] == kMinusInfinity ? 0.0f : shift[1]};
#pragma unroll
    for (int i = 0; i < kKeyBlock / 4; ++i) {
      const int row = i % 2;
      const float low = exp2_approx(fmaf(s[2 * i], scale_log2, -subtracted[row]));
      const float high = exp2_approx(fmaf(s[2 * i + 1], scale_log2, -subtracted[row]));
      chain[row][0] += low;
      chain[row][1] += high;
      p[i / 4][i % 4] = round_pair<Element>(low, high);
    }
    for (int row = 0; row < 2; ++row) total[row] = chain[row][0] + chain[row][1];
  }

  // Moves the shift of rows that grow to their largest logit.
  __device__ __forceinline__ void move_shift(const Logits& s, const bool (&grows)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float top = max_of_row<1>(s, row) * scale_log2;
      const bool moves = any_of_row(grows[row]) && top > shift[row];
      factor[row] = moves ? exp2_approx(shift[row] - top) : 1.0f;
      if (moves) shift[row] = top;
      sum[row] *= factor[row];
    }
  }

  // Of every kStride-th group of 8 keys.
  template <int kStride>
  __device__ __forceinline__ static float max_of_row(const Logits& s, int row) {
    float m[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int j = 0; j < kKeyBlock / 8; j += kStride) {
      m[j / kStride % 2] =
          fmaxf(m[j / kStride % 2], fmaxf(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
    }
    float top = fmaxf(m[0], m[1]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }

  // Over the four threads that share a row.
  __device__ __forceinline__ static bool any_of_row(bool x) {
    const std::uint32_t of_warp = __ballot_sync(~0u, x);
    return (of_warp >> (threadIdx.x % 32 / 4 * 4) & 15) != 0;
  }
};

}  // namespace ikbo::target_attention_impl
