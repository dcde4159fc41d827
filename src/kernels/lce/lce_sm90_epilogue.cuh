// SPDX-License-Identifier: Apache-2.0
// What one consumer warpgroup of lce_sm90 does with a finished tile of 64 n x kTileM m.
//
// "Fragment order" is the order in which its threads hold a tile: thread t of 128 has, for each 8
// columns of m, rows n = t / 4 % 8 + 16 (t / 32) and n + 8 at m = t % 4 * 2 and m + 1, one float4.
//   user_partial[u][tile of m][slice of n][kTileM / 8][128] float4
// A candidate's tile therefore adds its user's partial with coalesced loads and no transposition.
// The partial stays where the tile loop put it, part in registers and part in shared memory, for as
// long as tiles of the same user follow each other.
#pragma once

#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ptx_stmatrix.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/round_pair.cuh"
#include "kernels/lce/lce_sm90_traits.cuh"

namespace ikbo::lce_impl {

template <typename Traits>
struct Sm90Epilogue {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kFragments = Traits::kFragments;
  static constexpr int kInShared = Traits::kInShared;
  static constexpr int kInRegisters = Traits::kInRegisters;

  const Sm90Args& args;
  const CUtensorMap* map_out;
  typename Traits::SharedStorage& shared;
  int consumer;
  int thread;  // of the warpgroup

  __device__ __forceinline__ float4* partial_of(int user, int tile_m, int slice) const {
    return args.user_partial +
           ((static_cast<std::size_t>(user) * args.num_tiles_m + tile_m) * args.num_slices +
            slice) *
               (kFragments * kThreads);
  }

  __device__ __forceinline__ void sync() const {
    device::named_barrier_sync(1 + consumer, kThreads);
  }

  // The bias of fragment i.
  __device__ __forceinline__ float4 bias_of(int tile_m, int i) const {
    const auto* g_bias = static_cast<const Element*>(args.bias);
    const int m = tile_m * kTileM + i * 8 + thread % 4 * 2;
    const float b0 = g_bias != nullptr && m < args.m ? static_cast<float>(g_bias[m]) : 0.0f;
    const float b1 = g_bias != nullptr && m + 1 < args.m ? static_cast<float>(g_bias[m + 1]) : 0.0f;
    return make_float4(b0, b1, b0, b1);
  }

  // User stage: the tile is a part of the partial.
  __device__ __forceinline__ void store_partial(const float (&acc)[kTileM / 2], int user,
                                                int tile_m, int slice) const {
    float4* g_partial = partial_of(user, tile_m, slice) + thread;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const float4 bias = bias_of(tile_m, i);
      g_partial[i * kThreads] = make_float4(acc[4 * i] + bias.x, acc[4 * i + 1] + bias.y,
                                            acc[4 * i + 2] + bias.z, acc[4 * i + 3] + bias.w);
    }
  }

  // Makes the bias what the next tiles add.
  __device__ __forceinline__ void keep_bias(float4 (&in_registers)[kInRegisters],
                                            int tile_m) const {
    auto* s_partial = reinterpret_cast<float4*>(shared.partial[consumer]) + thread;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (i < kInShared) {
        s_partial[i * kThreads] = bias_of(tile_m, i);
      } else {
        in_registers[i - kInShared] = bias_of(tile_m, i);
      }
    }
  }

  // Asks for the partial that the next tiles add; the caller has synchronised the warpgroup since
  // the last tile was stored.
  __device__ __forceinline__ void fetch_partial(float4 (&in_registers)[kInRegisters],
                                                const float4* g_partial) const {
    if constexpr (kInShared > 0) {
      if (thread == 0) {
        const std::uint32_t barrier = device::smem_address(&shared.partial_full[consumer]);
        device::mbarrier_arrive_expect_bytes(barrier, Traits::kPartialBytes);
        device::bulk_load(device::smem_address(shared.partial[consumer]), g_partial,
                          Traits::kPartialBytes, barrier);
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i) {
      in_registers[i] = g_partial[(kInShared + i) * kThreads + thread];
    }
  }

  __device__ __forceinline__ void wait_partial(int phase) const {
    if constexpr (kInShared > 0) {
      device::mbarrier_wait(device::smem_address(&shared.partial_full[consumer]), phase);
    }
  }

  // Rounds fragments [i, i + 2) and stores 16 rows of m x 64 n (this warp's 16) to staging.
  __device__ __forceinline__ void stage_pair(const float* d, int i, std::uint32_t s_staging) const {
    const int lane = thread % 32;
    const int warp = thread / 32;
    // Matrices of 8 x 8: (m 0-7, n 0-7), (m 0-7, n 8-15), (m 8-15, n 0-7), (m 8-15, n 8-15).
    const int row = i * 8 + ((lane >> 4) << 3) + (lane & 7);
    const int chunk = warp * 2 + ((lane >> 3) & 1);
    device::store_matrices_transposed(
        s_staging + row * 128 + ((chunk ^ (row & 7)) << 4), device::round_pair<Element>(d[0], d[1]),
        device::round_pair<Element>(d[2], d[3]), device::round_pair<Element>(d[4], d[5]),
        device::round_pair<Element>(d[6], d[7]));
  }

  // Adds what the tile loop keeps, rounds, and starts the store of the tile. The caller has waited
  // for the store of the tile before (tma_store_wait_read, then sync()).
  __device__ __forceinline__ void store_tile(float (&acc)[kTileM / 2],
                                             const float4 (&in_registers)[kInRegisters], int b,
                                             int tile_m, int slice) const {
    const auto* s_partial = reinterpret_cast<const float4*>(shared.partial[consumer]) + thread;
    const std::uint32_t s_staging = device::smem_address(shared.staging[consumer]);
#pragma unroll
    for (int i = 0; i < kFragments; i += 2) {
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        const float4 v = j < kInShared ? s_partial[j * kThreads] : in_registers[j - kInShared];
        acc[4 * j] += v.x;
        acc[4 * j + 1] += v.y;
        acc[4 * j + 2] += v.z;
        acc[4 * j + 3] += v.w;
      }
      stage_pair(acc + 4 * i, i, s_staging);
    }
    device::fence_smem_to_async();
    sync();
    if (thread == 0 && b < args.batch && slice < args.num_slices) {
      device::tma_store_3d(map_out, s_staging, slice * kSliceN, tile_m * kTileM, b);
      device::tma_store_commit();
    }
    __syncwarp();
  }
};

}  // namespace ikbo::lce_impl
