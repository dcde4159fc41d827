// SPDX-License-Identifier: Apache-2.0
// The two products of target_attention_generic on tensor cores of any architecture since sm_80:
// 16-bit types, fp32 sums. A warp has 16 rows; of each, four lanes hold the logits and the output,
// as the matrix instruction lays out its result.
#pragma once

#include <cstdint>

#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/smem_address.cuh"
#include "kernels/target_attention/target_attention_layout.h"
#include "kernels/target_attention/target_attention_sm90_softmax.cuh"

namespace ikbo::target_attention_impl {

template <typename ElementT, int kHeadDimT>
struct MmaEngine {
  using Element = ElementT;
  using Word = std::uint16_t;
  static constexpr int kHeadDim = kHeadDimT;
  static constexpr int kKeyBlock = generic_key_block_of(kHeadDim * static_cast<int>(sizeof(Word)));
  // Of the rows in shared memory. An odd number of 16 bytes: eight rows of a matrix load hit all
  // banks.
  static constexpr int kPitch = kHeadDim + 8;
  static constexpr int kCtasPerSm = kHeadDim <= 128 ? 3 : 2;  // by registers

  // What a lane holds: logits of kRows rows at kKeys keys of a block, outputs at kColumns columns.
  static constexpr int kRows = 2;
  static constexpr int kLanesOfRow = 4;
  static constexpr int kKeys = kKeyBlock / kLanesOfRow;
  static constexpr int kColumns = kHeadDim / kLanesOfRow;
  static constexpr int kVector = 2;  // columns that follow each other

  template <int kWidth>
  struct Rows {
    float v[kWidth / 8][4] = {};

    __device__ __forceinline__ float& at(int row, int i) { return v[i / 2][2 * row + i % 2]; }
  };
  using Logits = Rows<kKeyBlock>;
  using Outputs = Rows<kHeadDim>;

  // Row `i` of the lane among the warp's; its key or column `i` is `first` + `step`.
  static __device__ __forceinline__ int row_of(int lane, int i) { return lane / 4 + 8 * i; }
  static __device__ __forceinline__ int first_key(int lane) { return lane % 4 * 2; }
  static __device__ __forceinline__ int first_column(int lane) { return lane % 4 * 2; }
  static constexpr __device__ int key_step(int i) { return i / 2 * 8 + i % 2; }
  static constexpr __device__ int column_step(int i) { return i / 2 * 8 + i % 2; }

  static __device__ __forceinline__ float exp2(float x) { return exp2_approx(x); }

  // logits += q k^T; `s_q` are the warp's rows.
  static __device__ __forceinline__ void multiply_keys(Logits& logits, const Word* s_q,
                                                       const Word* s_k, int lane) {
    const std::uint32_t q_row = device::smem_address(s_q + lane % 16 * kPitch + lane / 16 * 8);
    const std::uint32_t k_row =
        device::smem_address(s_k + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      std::uint32_t q[4];
      device::load_matrices(q, q_row + d * 2);
#pragma unroll
      for (int j = 0; j < kKeyBlock / 16; ++j) {
        std::uint32_t k[4];
        device::load_matrices(k, k_row + (j * 16 * kPitch + d) * 2);
        device::mma_m16n8k16<Element>(logits.v[2 * j], q, k[0], k[1]);
        device::mma_m16n8k16<Element>(logits.v[2 * j + 1], q, k[2], k[3]);
      }
    }
  }

  // out += weights v; the weights are rounded to the type of v.
  static __device__ __forceinline__ void multiply_values(Outputs& out, const Logits& weights,
                                                         const Word* s_v, int lane) {
    const std::uint32_t v_row = device::smem_address(s_v + lane % 16 * kPitch + lane / 16 * 8);
#pragma unroll
    for (int j = 0; j < kKeyBlock / 16; ++j) {
      const auto& low = weights.v[2 * j];
      const auto& high = weights.v[2 * j + 1];
      const std::uint32_t w[4] = {
          round_pair<Element>(low[0], low[1]), round_pair<Element>(low[2], low[3]),
          round_pair<Element>(high[0], high[1]), round_pair<Element>(high[2], high[3])};
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) {
        std::uint32_t v[4];
        device::load_matrices_transposed(v, v_row + (j * 16 * kPitch + d) * 2);
        device::mma_m16n8k16<Element>(out.v[d / 8], w, v[0], v[1]);
        device::mma_m16n8k16<Element>(out.v[d / 8 + 1], w, v[2], v[3]);
      }
    }
  }
};

}  // namespace ikbo::target_attention_impl
