// SPDX-License-Identifier: Apache-2.0
// LCE on any architecture, for any size, stride and alignment: 64 x 64 output tiles, fp32 sums.
// User stage: partial[u] = w_user e_user[u] + bias, fp32 [U, M, N].
// Candidate stage: out[b] = w_cand e_cand[b] + partial[cand_to_user[b]].
#pragma once

#include <cstdint>

namespace ikbo::lce_impl {

struct SimtArgs {
  const void* e;     // [batch, K, N]
  const void* w;     // [M, K]
  const void* bias;  // [M]; may be nullptr
  const float* add;  // [U, M, N] fp32; nullptr in the user stage
  const std::int32_t* cand_to_user;
  void* out;  // [batch, M, N] contiguous
  std::int64_t stride_e_batch;
  std::int64_t stride_e_k;
  std::int64_t stride_e_n;
  std::int64_t stride_w_m;
  std::int64_t stride_w_k;
  int m;
  int n;
  int k;
  int batch;
};

inline constexpr int kSimtTile = 64;
inline constexpr int kSimtBlockK = 16;
inline constexpr int kSimtThreads = 256;  // 16 x 16, 4 x 4 outputs each

template <typename Element, typename Out>
__global__ void __launch_bounds__(kSimtThreads) lce_simt_kernel(const SimtArgs args) {
  __shared__ float s_w[kSimtBlockK][kSimtTile + 4];
  __shared__ float s_e[kSimtBlockK][kSimtTile + 4];
  const int tiles_n = (args.n + kSimtTile - 1) / kSimtTile;
  const int tiles_m = (args.m + kSimtTile - 1) / kSimtTile;
  const std::int64_t num_tiles = static_cast<std::int64_t>(args.batch) * tiles_m * tiles_n;
  const auto* g_w = static_cast<const Element*>(args.w);
  const int row = static_cast<int>(threadIdx.x) / 16;
  const int column = static_cast<int>(threadIdx.x) % 16;

  for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const std::int64_t b = tile / (tiles_m * tiles_n);
    const int first_m = static_cast<int>(tile / tiles_n % tiles_m) * kSimtTile;
    const int first_n = static_cast<int>(tile % tiles_n) * kSimtTile;
    const auto* g_e = static_cast<const Element*>(args.e) + b * args.stride_e_batch;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < args.k; k0 += kSimtBlockK) {
      for (int i = static_cast<int>(threadIdx.x); i < kSimtBlockK * kSimtTile; i += kSimtThreads) {
        const int w_k = i % kSimtBlockK;
        const int w_m = i / kSimtBlockK;
        s_w[w_k][w_m] =
            k0 + w_k < args.k && first_m + w_m < args.m
                ? static_cast<float>(
                      g_w[(first_m + w_m) * args.stride_w_m + (k0 + w_k) * args.stride_w_k])
                : 0.0f;
        const int e_n = i % kSimtTile;
        const int e_k = i / kSimtTile;
        s_e[e_k][e_n] =
            k0 + e_k < args.k && first_n + e_n < args.n
                ? static_cast<float>(
                      g_e[(k0 + e_k) * args.stride_e_k + (first_n + e_n) * args.stride_e_n])
                : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kSimtBlockK; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            acc[i][j] = fmaf(s_w[k][row * 4 + i], s_e[k][column + 16 * j], acc[i][j]);
          }
        }
      }
      __syncthreads();
    }
    const std::int64_t user = args.add != nullptr ? args.cand_to_user[b] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at_m = first_m + row * 4 + i;
      if (at_m >= args.m) continue;
      const float bias = args.bias != nullptr
                             ? static_cast<float>(static_cast<const Element*>(args.bias)[at_m])
                             : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at_n = first_n + column + 16 * j;
        if (at_n >= args.n) continue;
        const float user_part =
            args.add != nullptr ? args.add[(user * args.m + at_m) * args.n + at_n] : bias;
        static_cast<Out*>(args.out)[(b * args.m + at_m) * args.n + at_n] =
            static_cast<Out>(acc[i][j] + user_part);
      }
    }
  }
}

}  // namespace ikbo::lce_impl
