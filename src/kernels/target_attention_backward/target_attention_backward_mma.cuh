// SPDX-License-Identifier: Apache-2.0
// The products of target_attention_backward on tensor cores of any architecture since sm_80: 16-bit
// operands, fp32 sums. A warp has 16 rows of the CTA's tile; four lanes hold one of them, as the
// matrix instruction lays out its result.
#pragma once

#include <cstdint>

#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/round_pair.cuh"
#include "kernels/device/smem_address.cuh"
#include "kernels/target_attention_backward/target_attention_backward_layout.h"

namespace ikbo::target_attention_backward_impl {

// A row of `kWidth` for each lane's two rows: value (row, column) is v[column / 8][2 * row + ..].
template <int kWidth>
struct Rows {
  float v[kWidth / 8][4] = {};

  // Column `i` of the lane is `column_of`(lane, i).
  static constexpr int kColumns = kWidth / 4;
  __device__ __forceinline__ float& at(int row, int i) { return v[i / 2][2 * row + i % 2]; }
  static __device__ __forceinline__ int column_of(int lane, int i) {
    return i / 2 * 8 + lane % 4 * 2 + i % 2;
  }
  static __device__ __forceinline__ int row_of(int lane, int row) { return lane / 4 + 8 * row; }
};

// Scores are those with kStep rows of the other kind.
template <typename Element, int kHeadDim, int kStep>
struct Products {
  // Of rows in shared memory. An odd number of 16 bytes: eight rows of a matrix load hit all banks.
  static constexpr int kPitch = kHeadDim + 8;
  using Scores = Rows<kStep>;
  using Sums = Rows<kHeadDim>;

  // scores += own other^T; `s_own` are the warp's 16 rows, `s_other` the others.
  static __device__ __forceinline__ void add_scores(Scores& scores, const std::uint16_t* s_own,
                                                    const std::uint16_t* s_other, int lane) {
    const std::uint32_t own_row = device::smem_address(s_own + lane % 16 * kPitch + lane / 16 * 8);
    const std::uint32_t other_row =
        device::smem_address(s_other + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8);
#pragma unroll 4
    for (int d = 0; d < kHeadDim; d += 16) {
      std::uint32_t a[4];
      device::load_matrices(a, own_row + d * 2);
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j) {
        std::uint32_t b[4];
        device::load_matrices(b, other_row + (j * 16 * kPitch + d) * 2);
        device::mma_m16n8k16<Element>(scores.v[2 * j], a, b[0], b[1]);
        device::mma_m16n8k16<Element>(scores.v[2 * j + 1], a, b[2], b[3]);
      }
    }
  }

  // sums += scores other; the scores are rounded to the type of `other`.
  static __device__ __forceinline__ void add_products(Sums& sums, const Scores& scores,
                                                      const std::uint16_t* s_other, int lane) {
    const std::uint32_t other_row =
        device::smem_address(s_other + lane % 16 * kPitch + lane / 16 * 8);
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j) {
      const auto& low = scores.v[2 * j];
      const auto& high = scores.v[2 * j + 1];
      const std::uint32_t a[4] = {device::round_pair<Element>(low[0], low[1]),
                                  device::round_pair<Element>(low[2], low[3]),
                                  device::round_pair<Element>(high[0], high[1]),
                                  device::round_pair<Element>(high[2], high[3])};
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) {
        std::uint32_t b[4];
        device::load_matrices_transposed(b, other_row + (j * 16 * kPitch + d) * 2);
        device::mma_m16n8k16<Element>(sums.v[d / 8], a, b[0], b[1]);
        device::mma_m16n8k16<Element>(sums.v[d / 8 + 1], a, b[2], b[3]);
      }
    }
  }
};

}  // namespace ikbo::target_attention_backward_impl
