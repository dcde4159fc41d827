// SPDX-License-Identifier: Apache-2.0
// What a consumer warpgroup of bmm_sm90 does: a tile of 64 columns x kTileP rows at a time.
#pragma once

#include "kernels/bmm/bmm_sm90_tiles.cuh"
#include "kernels/device/ptx_bulk_groups.cuh"
#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/ptx_stmatrix.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma_registers.cuh"
#include "kernels/device/ptx_wgmma_transposed.cuh"
#include "kernels/device/round_pair.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
struct Sm90Consumer : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Element = typename Traits::Element;
  using TileAt = typename Cta::TileAt;
  using Cta::empty;
  using Cta::full;
  using Cta::params;
  using Cta::stage;
  static constexpr int kTileP = Traits::kTileP;
  static constexpr int kSteps = kBlockR / 16;
  static constexpr int kStepA =
      Traits::kInnerA == BmmInner::kSum ? device::kWgmmaStepKMajor : device::kWgmmaStepMnMajor;

  // One arrival per warp: a warp knows only of its own share of the asynchronous reads.
  __device__ __forceinline__ void release(std::uint32_t barrier, int thread) const {
    if (thread % 32 == 0) device::mbarrier_arrive(barrier);
    __syncwarp();
  }

  __device__ __forceinline__ std::uint64_t describe_columns(std::uint32_t s_stage) const {
    if constexpr (Traits::kInnerB == BmmInner::kSum) {
      return device::wgmma_descriptor_k_major_128b(s_stage);
    } else {
      const int row = params.args.row_columns;
      return device::wgmma_descriptor_mn_major_chunks(s_stage, row, row * kBlockR * 2);
    }
  }

  // Rows of the instruction are the candidates' columns, its columns are P.
  template <int kCount>
  __device__ __forceinline__ void multiply(float (&acc)[kTileP / 2], std::uint32_t s_stage,
                                           std::uint32_t s_user, int accumulate) const {
    constexpr bool kIsMnMajor = Traits::kInnerB == BmmInner::kOut;
    const std::uint64_t cand = describe_columns(s_stage);
    const int step = kIsMnMajor ? 2 * params.args.row_columns : device::kWgmmaStepKMajor;
    device::fence_registers(acc);
    device::wgmma_fence();
    if constexpr (Traits::kInnerA == BmmInner::kSum) {
      const std::uint64_t user = device::wgmma_descriptor_k_major_128b(s_user);
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        device::wgmma_m64k16<Element, kTileP, kIsMnMajor>(acc, cand + s * step, user + s * kStepA,
                                                          s > 0 ? 1 : accumulate);
      }
    } else {
      const std::uint64_t user =
          device::wgmma_descriptor_mn_major_wide(s_user, Traits::kChunkBytes);
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        device::wgmma_m64k16_transposed<Element, kTileP, kIsMnMajor>(
            acc, cand + s * step, user + s * kStepA, s > 0 ? 1 : accumulate);
      }
    }
    device::wgmma_commit();
    device::fence_registers(acc);
  }

  __device__ __forceinline__ void multiply_last(float (&acc)[kTileP / 2], std::uint32_t s_stage,
                                                std::uint32_t s_user, int accumulate) const {
    switch (params.args.last_steps) {
      case 1:
        return multiply<1>(acc, s_stage, s_user, accumulate);
      case 2:
        return multiply<2>(acc, s_stage, s_user, accumulate);
      case 3:
        return multiply<3>(acc, s_stage, s_user, accumulate);
      default:
        return multiply<kSteps>(acc, s_stage, s_user, accumulate);
    }
  }

  // A block of R in shared memory.
  struct Block {
    int stage;
    int user_slot;  // where the user's matrix is streamed
  };
  __device__ __forceinline__ Block wait_block(int consumer, RingPosition& ring,
                                              RingPosition& user_ring) const {
    const Sm90Args& args = params.args;
    Block block{.stage = ring.slot, .user_slot = user_ring.slot};
    if (args.streams_user) {
      block.stage += consumer * args.ring_stages;
      device::mbarrier_wait(this->full_user(user_ring.slot), user_ring.phase);
      user_ring.advance(args.user_slots);
    }
    device::mbarrier_wait(full(block.stage), ring.phase);
    // What threads copied is read by wgmma, which is asynchronous.
    if (this->is_async()) device::fence_smem_to_async();
    ring.advance(args.ring_stages);
    return block;
  }
  __device__ __forceinline__ void release_block(const Block& block, int thread) const {
    release(empty(block.stage), thread);
    if (params.args.streams_user) release(this->empty_user(block.user_slot), thread);
  }

  // All blocks of R of a tile. Nothing is in flight afterwards. `s_user`: the matrix, where it is
  // resident.
  __device__ __forceinline__ void run_tile(float (&acc)[kTileP / 2], RingPosition& ring,
                                           RingPosition& user_ring, int consumer, int thread,
                                           std::uint32_t s_user) const {
    const bool streams = params.args.streams_user;
    const int last = params.args.num_blocks - 1;
    Block previous{};
#pragma unroll 1
    for (int i = 0; i < last; ++i) {
      const Block block = wait_block(consumer, ring, user_ring);
      multiply<kSteps>(acc, stage(block.stage),
                       streams ? this->user_matrix(block.user_slot) : s_user, i > 0);
      if (i > 0) {
        device::wgmma_wait<1>();
        release_block(previous, thread);
      }
      s_user += Traits::kUserBlockBytes;
      previous = block;
    }
    const Block block = wait_block(consumer, ring, user_ring);
    multiply_last(acc, stage(block.stage), streams ? this->user_matrix(block.user_slot) : s_user,
                  last > 0);
    if (!streams) release(this->turn(consumer ^ 1), thread);
    device::wgmma_wait<0>();
    device::fence_registers(acc);
    if (last > 0) release_block(previous, thread);
    release_block(block, thread);
  }

  // The candidates whose results a thread stores; -1: none.
  //   kTma      a lane of the first warp: the candidate of its box, from column n on
  //   kVectors  vector thread % 8 (8 columns of one candidate) of every 16th row of P
  //   kAlongP   vector thread % 8 (8 rows of P) of every 16th column
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kPasses = kStagingRows / kRowsAtOnce;
  struct Target {
    int cands[kPasses];
    int n;
  };
  __device__ __forceinline__ Target find_target(const TileAt& at, int thread) const {
    const Sm90Args& args = params.args;
    Target target{};
#pragma unroll
    for (int i = 0; i < kPasses; ++i) target.cands[i] = -1;
    if (args.store == BmmStore::kAlongP) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int column = thread / 8 + i * kRowsAtOnce;
        if (column < at.tile.num_columns) target.cands[i] = this->column_at(at.tile, column).cand;
      }
      return target;
    }
    const int column = args.store == BmmStore::kTma ? thread * args.box_columns : thread % 8 * 8;
    if (column < at.tile.num_columns) {
      const auto [cand, n] = this->column_at(at.tile, column);
      target.cands[0] = cand;
      target.n = n;
    }
    return target;
  }

  // Rounds 64 rows of P, acc's from kFirst on, to staging: for each candidate of `columns` columns
  // what lies side by side in `out`, in rows of 128 bytes, swizzled.
  template <int kFirst>
  __device__ __forceinline__ void stage_rows(const float (&acc)[kTileP / 2], std::uint32_t s_rows,
                                             int thread, int columns) const {
    const int lane = thread % 32;
    // Matrices of 8 x 8 (p, column): (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const int row = (lane >> 4 << 3) + (lane & 7);
    const int column = (thread / 32 * 2 + (lane >> 3 & 1)) * 8;
    const int n = column & (columns - 1);
    const int first = (column - n) * kStagingRows * 2 + (row * columns + n) * 2;
#pragma unroll
    for (int i = 0; i < kStagingRows / 16; ++i) {
      const float* d = acc + kFirst / 2 + i * 8;
      const int offset = first + i * 16 * 2 * columns;
      device::store_matrices_transposed(
          s_rows + (offset ^ (offset >> 3 & 0x70)), device::round_pair<Element>(d[0], d[1]),
          device::round_pair<Element>(d[2], d[3]), device::round_pair<Element>(d[4], d[5]),
          device::round_pair<Element>(d[6], d[7]));
    }
  }

  // Likewise, a row for each column.
  template <int kFirst>
  __device__ __forceinline__ void stage_columns(const float (&acc)[kTileP / 2],
                                                std::uint32_t s_rows, int thread) const {
    const int lane = thread % 32;
    // Matrices of 8 x 8 (column, p): (0-7, 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
    const int row = thread / 32 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll
    for (int i = 0; i < kStagingRows / 16; ++i) {
      const float* d = acc + kFirst / 2 + i * 8;
      const int vector = i * 2 + (lane >> 4);
      device::store_matrices(
          s_rows + row * 128 + ((vector ^ (row & 7)) << 4), device::round_pair<Element>(d[0], d[1]),
          device::round_pair<Element>(d[2], d[3]), device::round_pair<Element>(d[4], d[5]),
          device::round_pair<Element>(d[6], d[7]));
    }
  }

  // From staging to `out`, by all threads.
  __device__ __forceinline__ void store_vectors(const Target& target, std::uint32_t s_rows,
                                                int first_p, int thread) const {
    const Sm90Args& args = params.args;
    const int row = thread / 8;
    const std::uint32_t s_first = s_rows + row * 128 + ((thread % 8 ^ row % 8) << 4);
    const bool is_along_p = args.store == BmmStore::kAlongP;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint4 value = device::load_shared(s_first + i * kRowsAtOnce * 128);
      const int cand = is_along_p ? target.cands[i] : target.cands[0];
      const int p = first_p + (is_along_p ? thread % 8 * 8 : row + i * kRowsAtOnce);
      if (cand >= 0 && p < args.p) {
        device::store_global(
            static_cast<Element*>(args.out) + (std::int64_t{cand} * args.p + p) * args.n + target.n,
            value);
      }
    }
  }

  // NOTE: one barrier per buffer. Who is past the one of a buffer may write the next: the warp that
  // issues stores has waited until the copy engine has read it, the other threads have read it
  // themselves before they came to the barrier of the buffer between.
  template <int kFirst>
  __device__ __forceinline__ void store_rows(const float (&acc)[kTileP / 2], const Target& target,
                                             int first_p, int consumer, int thread,
                                             int& buffer) const {
    static_assert(kStagingBuffers >= 3);
    const Sm90Args& args = params.args;
    const int p = first_p + kFirst;
    if (p >= args.p) return;
    const bool is_tma = args.store == BmmStore::kTma;
    const std::uint32_t s_rows = this->staging(consumer, buffer);
    buffer = buffer + 1 == kStagingBuffers ? 0 : buffer + 1;
    if (args.store == BmmStore::kAlongP) {
      stage_columns<kFirst>(acc, s_rows, thread);
    } else {
      stage_rows<kFirst>(acc, s_rows, thread, is_tma ? args.box_columns : kTileColumns);
    }
    if (is_tma) {
      device::fence_smem_to_async();
      if (thread < 32) device::tma_store_wait_read_but<kStagingBuffers - 2>();
    }
    device::named_barrier_sync(1 + consumer, kThreads);
    if (!is_tma) {
      store_vectors(target, s_rows, p, thread);
    } else if (thread < 32) {
      if (target.cands[0] >= 0) {
        device::tma_store_3d(&params.out, s_rows + thread * args.box_columns * kStagingRows * 2,
                             target.n, p / kStagingRows * args.box_columns, target.cands[0]);
      }
      device::tma_store_commit();
    }
    if constexpr (kFirst + kStagingRows < kTileP) {
      store_rows<kFirst + kStagingRows>(acc, target, first_p, consumer, thread, buffer);
    }
  }

  __device__ __forceinline__ void consume(int consumer, int thread) const {
    float acc[kTileP / 2] = {};
    RingPosition ring;
    RingPosition user_ring;  // of the next user
    int user_slot = -1;
    int buffer = 0;
    int turn_phase = consumer == 0 ? 1 : 0;  // the first turn is consumer 0's
    int owner = 0;                           // of the next tile
    TileListener<Traits> listener(*this);
    TileAt at{};
    // The first tile, which has no columns, is stored by both: nothing is, but the instructions
    // come while the first loads are on their way.
    for (bool is_tile = false;;) {
      if (!is_tile || owner == consumer) {
        const Target target = find_target(at, thread);
        if (is_tile) {
          // NOTE: stages of tiles in turn share a ring. Only when the other consumer has seen all
          // of its own filled does a phase tell this one whether its own are.
          device::mbarrier_wait(this->turn(consumer), turn_phase);
          turn_phase ^= 1;
          run_tile(acc, ring, user_ring, consumer, thread, this->user_matrix(user_slot));
          if (at.ends_user) {
            release(this->empty_user(user_slot), thread);
            user_slot = -1;
          }
        }
        store_rows<0>(acc, target, at.tile_p * kTileP, consumer, thread, buffer);
      } else {
        ring.skip(params.args.num_blocks, params.args.stages);
      }
      if (is_tile) owner ^= 1;
      is_tile = listener.take(at);
      if (!is_tile) break;
      // NOTE: a consumer without a tile of a user waits for that user's matrix all the same: so no
      // barrier is ever two laps ahead of it.
      if (at.is_new_user) {
        if (user_slot >= 0) release(this->empty_user(user_slot), thread);
        device::mbarrier_wait(this->full_user(user_ring.slot), user_ring.phase);
        user_slot = user_ring.slot;
        user_ring.advance(params.args.user_slots);
      }
    }
    // Shared memory outlives the copy engine's reads.
    if (thread < 32) device::tma_store_wait_read();
  }

  // Where the user's matrix is streamed: both consumers work at the same block of it at a time,
  // each on a tile of the user, the second one on none where their number is odd.
  __device__ __forceinline__ void consume_pairs(int consumer, int thread) const {
    const Sm90Args& args = params.args;
    float acc[kTileP / 2];
    RingPosition ring;
    RingPosition user_ring;
    int buffer = 0;
    TileListener<Traits> listener(*this);
    for (TileAt at; listener.take(at);) {
      const bool is_pair = !at.ends_user;
      if (is_pair) {
        TileAt second;
        listener.take(second);
        if (consumer == 1) at = second;
      } else if (consumer == 1) {
        for (int block = 0; block < args.num_blocks; ++block) {
          device::mbarrier_wait(this->full_user(user_ring.slot), user_ring.phase);
          release(this->empty_user(user_ring.slot), thread);
          user_ring.advance(args.user_slots);
        }
        continue;
      }
      const Target target = find_target(at, thread);
      run_tile(acc, ring, user_ring, consumer, thread, 0);
      store_rows<0>(acc, target, at.tile_p * kTileP, consumer, thread, buffer);
    }
    if (thread < 32) device::tma_store_wait_read();
  }
};

}  // namespace ikbo::bmm_impl
