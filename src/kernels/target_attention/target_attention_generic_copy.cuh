// SPDX-License-Identifier: Apache-2.0
// Copies rows of Q, K and V of any stride and alignment into shared memory, by all threads of a
// CTA. What is no element of the operand becomes 0.
#pragma once

#include <cstdint>

#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/device/smem_address.cuh"
#include "kernels/target_attention/target_attention_generic_args.cuh"

namespace ikbo::target_attention_impl {

inline constexpr int kGenericThreads = 128;
inline constexpr int kWarpRows = 16;

// One tile of an operand: kNumRows rows of Engine::kHeadDim elements, of which `head_dim` exist.
// `row_at(row)` is where a row begins in global memory, nullptr where there is none.
template <typename Engine, int kNumRows>
struct RowCopies {
  using Word = typename Engine::Word;
  static constexpr int kWordElements = 4 / sizeof(Word);
  static constexpr int kVectorElements = 16 / sizeof(Word);

  // Where copy `i` of this thread lies in the tile, kElements elements each.
  struct Place {
    int row;
    int d;
  };
  template <int kElements>
  static __device__ __forceinline__ Place place_of(int i, bool along_rows) {
    constexpr int kCopiesOfRow = Engine::kHeadDim / kElements;
    const int at = i * kGenericThreads + static_cast<int>(threadIdx.x);
    if (along_rows) return {at % kNumRows, at / kNumRows * kElements};
    return {at / kCopiesOfRow, at % kCopiesOfRow * kElements};
  }
  template <int kElements>
  static constexpr int kCopies = kNumRows * Engine::kHeadDim / (kElements * kGenericThreads);
  static_assert(kNumRows * Engine::kHeadDim % (kVectorElements * kGenericThreads) == 0);

  template <int kElements, typename RowAt>
  static __device__ __forceinline__ void copy_asynchronously(Word* s_tile,
                                                             const GenericOperand& operand,
                                                             bool along_rows, int head_dim,
                                                             RowAt&& row_at) {
    const std::uint32_t s_first = device::smem_address(s_tile);
#pragma unroll 4
    for (int i = 0; i < kCopies<kElements>; ++i) {
      const Place at = place_of<kElements>(i, along_rows);
      const Word* g_row = row_at(at.row);
      const int valid = g_row == nullptr ? 0 : min(max(head_dim - at.d, 0), kElements);
      const void* g_source = valid > 0 ? g_row + at.d * operand.stride[3] : operand.data;
      constexpr int kBytes = static_cast<int>(sizeof(Word));
      device::copy_async<kElements * kBytes>(s_first + (at.row * Engine::kPitch + at.d) * kBytes,
                                             g_source, valid * kBytes);
    }
  }

  template <typename RowAt>
  static __device__ __forceinline__ void copy_elements(Word* s_tile, const GenericOperand& operand,
                                                       int head_dim, RowAt&& row_at) {
    constexpr int kAtOnce = 8;
    static_assert(kCopies<1> % kAtOnce == 0);
#pragma unroll 1
    for (int first = 0; first < kCopies<1>; first += kAtOnce) {
      Word values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Place at = place_of<1>(first + i, operand.along_rows);
        const Word* g_row = row_at(at.row);
        const bool exists = g_row != nullptr && at.d < head_dim;
        values[i] = exists ? g_row[at.d * operand.stride[3]] : Word{0};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Place at = place_of<1>(first + i, operand.along_rows);
        s_tile[at.row * Engine::kPitch + at.d] = values[i];
      }
    }
  }

  // Asynchronous copies are left to be committed.
  template <typename RowAt>
  static __device__ __forceinline__ void copy(Word* s_tile, const GenericOperand& operand,
                                              int head_dim, RowAt&& row_at) {
    if (operand.width == CopyWidth::kVector) {
      copy_asynchronously<kVectorElements>(s_tile, operand, false, head_dim, row_at);
    } else if (sizeof(Word) == 4 || operand.width == CopyWidth::kWord) {
      copy_asynchronously<kWordElements>(s_tile, operand, operand.along_rows, head_dim, row_at);
    } else {
      copy_elements(s_tile, operand, head_dim, row_at);
    }
  }
};

}  // namespace ikbo::target_attention_impl
