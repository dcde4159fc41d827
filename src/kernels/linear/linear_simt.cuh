// SPDX-License-Identifier: Apache-2.0
// One stage of linear on any architecture, for any size, stride and alignment, with fp32 sums:
//   user stage       partial[u] = w_user x_user[u] + bias, fp32 [U, M]
//   candidate stage  out[b] = act(w_cand x_cand[b] + partial[cand_to_user[b]])
// A CTA has one tile of 64 rows x 64 columns, each of its 128 threads 8 rows x 4 columns. The next
// 16 k are on their way from global memory to registers while the last ones are multiplied.
#pragma once

#include <cstdint>

#include "kernels/device/activation.cuh"

namespace ikbo::linear_impl {

struct SimtArgs {
  const void* x;                     // [rows, K]
  const void* w;                     // [M, K]
  const void* bias;                  // [M]; may be nullptr
  const float* user_partial;         // [U, M]; nullptr in the user stage
  const std::int32_t* cand_to_user;  // [rows], candidate stage
  void* out;                         // [rows, M] contiguous
  std::int64_t stride_x_row;
  std::int64_t stride_x_k;
  std::int64_t stride_w_m;
  std::int64_t stride_w_k;
  int m;
  int k;
  int rows;
  Activation activation;
};

inline constexpr int kSimtTile = 64;
inline constexpr int kSimtBlockK = 16;
inline constexpr int kSimtThreads = 128;

template <typename Element, typename Out>
struct LinearSimt {
  static constexpr int kLoads = kSimtTile * kSimtBlockK / kSimtThreads;  // per thread and operand
  using Tile = float[kSimtBlockK][kSimtTile + 4];

  const SimtArgs& args;
  std::int64_t first_row;
  int first_m;

  // Rows [first, first + 64) x 16 k of a matrix, zero outside of it.
  __device__ __forceinline__ static void fetch(float (&r)[kLoads], const void* data,
                                               std::int64_t first, std::int64_t rows,
                                               std::int64_t stride_row, std::int64_t stride_k,
                                               int k0, int k) {
    const auto* g = static_cast<const Element*>(data);
    const int at_k = k0 + static_cast<int>(threadIdx.x) % kSimtBlockK;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t row = first + i * (kSimtThreads / kSimtBlockK) + threadIdx.x / kSimtBlockK;
      r[i] =
          at_k < k && row < rows ? static_cast<float>(g[row * stride_row + at_k * stride_k]) : 0.0f;
    }
  }

  __device__ __forceinline__ static void put(const float (&r)[kLoads], Tile& s_tile) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      s_tile[threadIdx.x % kSimtBlockK]
            [i * (kSimtThreads / kSimtBlockK) + threadIdx.x / kSimtBlockK] = r[i];
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[8][4], Tile& s_x, Tile& s_w) const {
    const int row = static_cast<int>(threadIdx.x) / 16 * 8;
    const int column = static_cast<int>(threadIdx.x) % 16 * 4;
    float x[kLoads];
    float w[kLoads];
    fetch(x, args.x, first_row, args.rows, args.stride_x_row, args.stride_x_k, 0, args.k);
    fetch(w, args.w, first_m, args.m, args.stride_w_m, args.stride_w_k, 0, args.k);
    for (int k0 = 0; k0 < args.k; k0 += kSimtBlockK) {
      __syncthreads();
      put(x, s_x);
      put(w, s_w);
      __syncthreads();
      const int next = k0 + kSimtBlockK;
      fetch(x, args.x, first_row, args.rows, args.stride_x_row, args.stride_x_k, next, args.k);
      fetch(w, args.w, first_m, args.m, args.stride_w_m, args.stride_w_k, next, args.k);
#pragma unroll
      for (int k = 0; k < kSimtBlockK; ++k) {
        const float4 a0 = *reinterpret_cast<const float4*>(&s_x[k][row]);
        const float4 a1 = *reinterpret_cast<const float4*>(&s_x[k][row + 4]);
        const float4 b = *reinterpret_cast<const float4*>(&s_w[k][column]);
        const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          acc[i][0] = fmaf(a[i], b.x, acc[i][0]);
          acc[i][1] = fmaf(a[i], b.y, acc[i][1]);
          acc[i][2] = fmaf(a[i], b.z, acc[i][2]);
          acc[i][3] = fmaf(a[i], b.w, acc[i][3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const float (&acc)[8][4]) const {
    const int column = first_m + static_cast<int>(threadIdx.x) % 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int64_t row = first_row + threadIdx.x / 16 * 8 + i;
      if (row >= args.rows) return;
      const float* g_partial =
          args.user_partial == nullptr
              ? nullptr
              : args.user_partial + static_cast<std::int64_t>(args.cand_to_user[row]) * args.m;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = column + j;
        if (m >= args.m) break;
        float value = acc[i][j];
        if (g_partial != nullptr) {
          value = device::activate(args.activation, value + g_partial[m]);
        } else if (args.bias != nullptr) {
          value += static_cast<float>(static_cast<const Element*>(args.bias)[m]);
        }
        static_cast<Out*>(args.out)[row * args.m + m] = static_cast<Out>(value);
      }
    }
  }
};

template <typename Element, typename Out>
__global__ void __launch_bounds__(kSimtThreads) linear_simt_kernel(const SimtArgs args) {
  __shared__ float s_x[kSimtBlockK][kSimtTile + 4];
  __shared__ float s_w[kSimtBlockK][kSimtTile + 4];
  const int tiles_m = (args.m + kSimtTile - 1) / kSimtTile;
  const std::int64_t num_tiles =
      (static_cast<std::int64_t>(args.rows) + kSimtTile - 1) / kSimtTile * tiles_m;
  for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const LinearSimt<Element, Out> linear{args, tile / tiles_m * kSimtTile,
                                          static_cast<int>(tile % tiles_m) * kSimtTile};
    float acc[8][4] = {};
    linear.multiply(acc, s_x, s_w);
    linear.store(acc);
    __syncthreads();
  }
}

}  // namespace ikbo::linear_impl
