// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup of bmm_sm90 does: a tile of 64 columns x kTileP rows at a time.
#pragma once

#include "kernels/bmm/bmm_sm90_cta.cuh"
#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/ptx_stmatrix.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma_registers.cuh"
#include "kernels/device/ptx_wgmma_transposed.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
struct Sm90Consumer : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Element = typename Traits::Element;
  using TileAt = typename Cta::TileAt;
  using TileCursor = typename Cta::TileCursor;
  using Cta::empty;
  using Cta::full;
  using Cta::params;
  using Cta::stage;
  static constexpr int kTileP = Traits::kTileP;
  static constexpr int kSteps = kBlockR / 16;
  static constexpr int kStepA =
      Traits::kInnerA == BmmInner::kSum ? device::kWgmmaStepKMajor : device::kWgmmaStepMnMajor;
  static constexpr int kStepB =
      Traits::kInnerB == BmmInner::kSum ? device::kWgmmaStepKMajor : device::kWgmmaStepMnMajor;

  // One arrival per warp: a warp knows only of its own share of the asynchronous reads.
  __device__ __forceinline__ void release(std::uint32_t barrier, int thread) const {
    if (thread % 32 == 0) device::mbarrier_arrive(barrier);
    __syncwarp();
  }

  // Rows of the instruction are the candidates' columns, its columns are P.
  template <int kCount>
  __device__ __forceinline__ void multiply(float (&acc)[kTileP / 2], std::uint32_t s_cand,
                                           std::uint32_t s_user, int accumulate) const {
    constexpr bool kIsMnMajor = Traits::kInnerB == BmmInner::kOut;
    const std::uint64_t cand = kIsMnMajor ? device::wgmma_descriptor_mn_major(s_cand)
                                          : device::wgmma_descriptor_k_major_128b(s_cand);
    device::fence_registers(acc);
    device::wgmma_fence();
    if constexpr (Traits::kInnerA == BmmInner::kSum) {
      const std::uint64_t user = device::wgmma_descriptor_k_major_128b(s_user);
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        device::wgmma_m64k16<Element, kTileP, kIsMnMajor>(acc, cand + s * kStepB, user + s * kStepA,
                                                          s > 0 ? 1 : accumulate);
      }
    } else {
      const std::uint64_t user =
          device::wgmma_descriptor_mn_major_wide(s_user, Traits::kChunkBytes);
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        device::wgmma_m64k16_transposed<Element, kTileP, kIsMnMajor>(
            acc, cand + s * kStepB, user + s * kStepA, s > 0 ? 1 : accumulate);
      }
    }
    device::wgmma_commit();
    device::fence_registers(acc);
  }

  __device__ __forceinline__ void multiply_last(float (&acc)[kTileP / 2], std::uint32_t s_cand,
                                                std::uint32_t s_user, int accumulate) const {
    switch (params.args.last_steps) {
      case 1:
        return multiply<1>(acc, s_cand, s_user, accumulate);
      case 2:
        return multiply<2>(acc, s_cand, s_user, accumulate);
      case 3:
        return multiply<3>(acc, s_cand, s_user, accumulate);
      default:
        return multiply<kSteps>(acc, s_cand, s_user, accumulate);
    }
  }

  __device__ __forceinline__ void wait_full(int consumer, const RingPosition& ring) const {
    device::mbarrier_wait(full(consumer, ring.slot), ring.phase);
    // What threads copied is read by wgmma, which is asynchronous.
    if (this->is_async()) device::fence_smem_to_async();
  }

  // All blocks of R of a tile. Nothing is in flight afterwards.
  __device__ __forceinline__ void run_tile(float (&acc)[kTileP / 2], RingPosition& ring,
                                           int consumer, int thread, std::uint32_t s_user) const {
    const int last = params.args.num_blocks - 1;
    int previous = 0;
#pragma unroll 1
    for (int block = 0; block < last; ++block) {
      wait_full(consumer, ring);
      multiply<kSteps>(acc, stage(consumer, ring.slot), s_user, block > 0);
      if (block > 0) {
        device::wgmma_wait<1>();
        release(empty(consumer, previous), thread);
      }
      s_user += Traits::kUserBlockBytes;
      previous = ring.slot;
      ring.advance(params.args.stages);
    }
    wait_full(consumer, ring);
    multiply_last(acc, stage(consumer, ring.slot), s_user, last > 0);
    device::wgmma_wait<0>();
    device::fence_registers(acc);
    if (last > 0) release(empty(consumer, previous), thread);
    release(empty(consumer, ring.slot), thread);
    ring.advance(params.args.stages);
  }

  // A thread stores vector thread % 8 (8 columns of one candidate) of every 16th row.
  struct Target {
    Element* data;  // row 0 of the candidate's result
    bool exists;
  };
  __device__ __forceinline__ Target find_target(const TileAt& at, int thread) const {
    const Sm90Args& args = params.args;
    const int column = thread % 8 * 8;
    if (column >= at.tile.num_columns) return {nullptr, false};
    const auto [cand, n] = this->column_at(at.tile, column);
    return {static_cast<Element*>(args.out) + std::int64_t{cand} * args.p * args.n + n, true};
  }

  // Rounds 64 rows of P, acc's from kFirst on, to staging: rows of 128 bytes, swizzled.
  template <int kFirst>
  __device__ __forceinline__ void stage_rows(const float (&acc)[kTileP / 2], std::uint32_t s_rows,
                                             int thread) const {
    const int lane = thread % 32;
    // Matrices of 8 x 8 (p, column): (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const int row = (lane >> 4 << 3) + (lane & 7);
    const int vector = thread / 32 * 2 + (lane >> 3 & 1);
    const std::uint32_t s_first = s_rows + row * 128 + ((vector ^ (row & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kStagingRows / 16; ++i) {
      const float* d = acc + kFirst / 2 + i * 8;
      device::store_matrices_transposed(
          s_first + i * 16 * 128, device::round_pair<Element>(d[0], d[1]),
          device::round_pair<Element>(d[2], d[3]), device::round_pair<Element>(d[4], d[5]),
          device::round_pair<Element>(d[6], d[7]));
    }
  }

  template <int kFirst>
  __device__ __forceinline__ void store_rows(const float (&acc)[kTileP / 2], const Target& target,
                                             int first_p, int consumer, int thread,
                                             int& buffer) const {
    const Sm90Args& args = params.args;
    if (first_p + kFirst >= args.p) return;
    const std::uint32_t s_rows = this->staging(consumer, buffer);
    buffer ^= 1;
    stage_rows<kFirst>(acc, s_rows, thread);
    // NOTE: one barrier per buffer: who is past it has read the other buffer.
    device::named_barrier_sync(1 + consumer, kThreads);
    const int row = thread / 8;
    const std::uint32_t s_first = s_rows + row * 128 + ((thread % 8 ^ row % 8) << 4);
    constexpr int kRowsAtOnce = kThreads / 8;
#pragma unroll
    for (int i = 0; i < kStagingRows / kRowsAtOnce; ++i) {
      const uint4 value = device::load_shared(s_first + i * kRowsAtOnce * 128);
      const int p = first_p + kFirst + row + i * kRowsAtOnce;
      if (target.exists && p < args.p) {
        device::store_global(target.data + std::int64_t{p} * args.n, value);
      }
    }
    if constexpr (kFirst + kStagingRows < kTileP) {
      store_rows<kFirst + kStagingRows>(acc, target, first_p, consumer, thread, buffer);
    }
  }

  __device__ __forceinline__ void consume(int consumer, int thread) const {
    float acc[kTileP / 2];
    RingPosition ring;
    RingPosition user_ring;  // of the next user
    int user_slot = -1;
    int buffer = 0;
    TileCursor cursor(params.args);
    for (TileAt at; cursor.take(at);) {
      // NOTE: a consumer without a tile of a user waits for that user's matrix all the same: so no
      // barrier is ever two laps ahead of it.
      if (at.is_new_user) {
        if (user_slot >= 0) release(this->empty_user(user_slot), thread);
        device::mbarrier_wait(this->full_user(user_ring.slot), user_ring.phase);
        user_slot = user_ring.slot;
        user_ring.advance(params.args.user_slots);
      }
      if (at.consumer != consumer) continue;
      const Target target = find_target(at, thread);
      run_tile(acc, ring, consumer, thread, this->user_matrix(user_slot));
      store_rows<0>(acc, target, at.tile_p * kTileP, consumer, thread, buffer);
    }
  }
};

}  // namespace ikbo::bmm_impl
