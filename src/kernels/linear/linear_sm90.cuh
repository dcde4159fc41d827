// SPDX-License-Identifier: Apache-2.0
// One stage (user or candidate) of linear on Hopper: D[rows, M] = X W^T by TMA and wgmma.
//
// A CTA has `kConsumers` consumer warpgroups, each with 64 rows of X against the same kTileM rows
// of W, and producers:
//   producers  wait for an empty stage, then fill it with 64 k of the tile's rows of X and of W:
//              one thread by the copy engine (TMA) what lies at multiples of 16 bytes, all of a
//              warpgroup by asynchronous copies of 4 bytes, or by plain loads, what does not.
//   consumers  wait for a full stage, issue wgmma, release the stage before; at the end of a tile
//              they run the stage's epilogue (linear_sm90_epilogue.cuh) from their registers.
// CTAs are persistent over tiles, or a cluster of them shares one tile's sum over k (split_k).
//
// Row c of a tile of W in shared memory is row 4 * (c % (kTileM / 4)) + c / (kTileM / 4) of the
// tile: a thread's accumulators of 32 columns then hold 8 neighbours in M, so that partials are
// read and outputs written 16 bytes a thread, with no exchange between threads. For the copy engine
// that is four boxes, one per residue modulo 4 of the row. Two maps keep it inside of W when M is
// no multiple of 4: one of the residues that the last, partial group of four has, one of the
// others. What lies outside of X or W, past K too, is zero in shared memory. Programmatic dependent
// launch: the candidate grid starts while the user grid runs and waits for it only before it reads
// the first partial.
#pragma once

#include "kernels/device/ptx_cluster.cuh"
#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma.cuh"
#include "kernels/device/ring_position.cuh"
#include "kernels/device/smem_address.cuh"
#include "kernels/linear/linear_layout.h"

namespace ikbo::linear_impl {

// Rows [rows, k] of X or W, k contiguous.
struct RowSource {
  const void* data;
  std::int64_t stride;
  int rows;
  LinearFeed feed;  // any but kCopied
};

struct Sm90Args {
  RowSource x;
  RowSource w;
  float* user_partial;               // [U, partial_columns]; written by the user stage
  std::int64_t partial_columns;      // read by the candidate stage
  const void* bias;                  // [M], user stage; may be nullptr
  const std::int32_t* cand_to_user;  // [B]; nullptr in the user stage
  void* out;                         // [B, M]
  Activation activation;
  int m;
  int k;
  int num_tiles;
  int num_tiles_m;
  int num_blocks_k;  // ceil(K / 64)
  int split_k;       // at most num_blocks_k
};

struct Sm90Maps {
  const CUtensorMap* x;
  const CUtensorMap* w;       // residues of the last, partial group of four rows
  const CUtensorMap* w_full;  // the others
};

template <typename ElementT, int kTileMT, int kConsumersT>
struct Sm90Traits {
  using Element = ElementT;
  static constexpr int kTileM = kTileMT;
  static constexpr int kConsumers = kConsumersT;
  static constexpr int kTileRows = 64 * kConsumers;
  static constexpr int kCtasPerSm = kConsumers == 1 ? 2 : 1;
  static constexpr int kNumThreads = (kConsumers + 1) * kThreads;
  static constexpr int kRowBytes = kBlockK * 2;
  static constexpr int kStageBytes = (kTileRows + kTileM) * kRowBytes;
  // 228 KB per SM, of which each CTA costs 1 KB, and its base's alignment another.
  static constexpr int kMaxSharedBytes = 233472 / kCtasPerSm - 2048;
  static constexpr int kFit = (kMaxSharedBytes - 256) / kStageBytes;
  static constexpr int kNumStages = kFit < 12 ? kFit : 12;
  static_assert(kNumStages >= 4 && kTileM % 32 == 0);

  struct SharedStorage {
    alignas(1024) unsigned char stages[kNumStages][kStageBytes];
    std::uint64_t full[kNumStages];
    std::uint64_t empty[kNumStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage) + 1024;
  static_assert(kSharedBytes <= 232448);
};

template <typename Traits>
struct Mainloop {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileRows = Traits::kTileRows;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kConsumerThreads = Traits::kConsumers * kThreads;

  const Sm90Args& args;
  typename Traits::SharedStorage& shared;
  int first_block;  // of k
  int end_block;
  device::FixedRingPosition<kStages> ring = {};

  __device__ __forceinline__ std::uint32_t full(int s) const {
    return device::smem_address(&shared.full[s]);
  }
  __device__ __forceinline__ std::uint32_t empty(int s) const {
    return device::smem_address(&shared.empty[s]);
  }

  __device__ __forceinline__ bool has_copies() const {
    return args.x.feed != LinearFeed::kTma || args.w.feed != LinearFeed::kTma;
  }
  __device__ __forceinline__ int tma_bytes() const {
    return (args.x.feed == LinearFeed::kTma ? kTileRows * Traits::kRowBytes : 0) +
           (args.w.feed == LinearFeed::kTma ? kTileM * Traits::kRowBytes : 0);
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < kStages; ++s) {
      device::mbarrier_init(full(s), (tma_bytes() > 0 ? 1 : 0) + (has_copies() ? kThreads : 0));
      device::mbarrier_init(empty(s), kConsumerThreads / 32);
    }
    device::mbarrier_init_fence();
  }

  __device__ __forceinline__ void load_by_tma(const Sm90Maps& maps, std::uint32_t s_stage,
                                              int first_row, int first_m, int k) const {
    device::mbarrier_arrive_expect_bytes(full(ring.slot), tma_bytes());
    if (args.x.feed == LinearFeed::kTma) {
      device::tma_load_3d(s_stage, maps.x, full(ring.slot), k, 0, first_row);
    }
    if (args.w.feed == LinearFeed::kTma) {
      const int last_group = (args.m - 1) % 4 + 1;  // rows of it
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        device::tma_load_3d(s_stage + (kTileRows + r * (kTileM / 4)) * Traits::kRowBytes,
                            r < last_group ? maps.w : maps.w_full, full(ring.slot), k, r,
                            first_m / 4);
      }
    }
  }

  // By all producer threads: a warp copies the 128 bytes of a row, a thread 4 of them.
  struct Word {
    int k;      // of its first element
    int bytes;  // of it that lie inside of k
    int lane;

    __device__ __forceinline__ std::uint32_t address(std::uint32_t s_rows, int row) const {
      return s_rows + row * Traits::kRowBytes + (((lane / 4) ^ (row & 7)) << 4) + lane % 4 * 4;
    }
  };

  // Rows first, first + kStep, ... of the tensor to kRows rows of shared memory, every fourth by
  // this warp. NOTE: addresses are carried along, not computed per row: a stage is hundreds of
  // copies.
  template <int kRows, int kStep>
  __device__ __forceinline__ void copy_rows(const RowSource& source, std::uint32_t s_rows,
                                            const Word& word, int warp, int first) const {
    static_assert(kRows % 8 == 0);
    const std::int64_t g_step = 4 * kStep * source.stride;
    const auto* g = static_cast<const std::uint16_t*>(source.data) +
                    (first + warp * kStep) * source.stride + word.k;
    const std::uint32_t s_even = word.address(s_rows, warp);
    const std::uint32_t s_odd = word.address(s_rows, warp + 4);
    const int rows_left = max(source.rows - first - warp * kStep, 0);
    const int limit = (rows_left + 4 * kStep - 1) / (4 * kStep);  // of this warp's rows
#pragma unroll 2
    for (int pair = 0; pair < kRows / 8; ++pair) {
      device::copy_async<4>(s_even + pair * 8 * Traits::kRowBytes, g,
                            2 * pair < limit ? word.bytes : 0);
      g += g_step;
      device::copy_async<4>(s_odd + pair * 8 * Traits::kRowBytes, g,
                            2 * pair + 1 < limit ? word.bytes : 0);
      g += g_step;
    }
  }

  // The same for rows of x at odd elements, by plain loads, four rows at a time.
  __device__ __forceinline__ void copy_elements(std::uint32_t s_rows, const Word& word, int warp,
                                                int first_row) const {
    constexpr int kBatch = 4;
    constexpr int kWarps = kThreads / 32;
#pragma unroll 1
    for (int first = warp; first < kTileRows; first += kBatch * kWarps) {
      std::uint32_t values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int row = first_row + first + j * kWarps;
        const int bytes = row < args.x.rows ? word.bytes : 0;
        const auto* g = static_cast<const std::uint16_t*>(args.x.data) +
                        (bytes > 0 ? row * args.x.stride + word.k : 0);
        values[j] = bytes > 0 ? g[0] : 0;
        if (bytes > 2) values[j] |= static_cast<std::uint32_t>(g[1]) << 16;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(word.address(s_rows, first + j * kWarps)),
                     "r"(values[j])
                     : "memory");
      }
    }
  }

  __device__ __forceinline__ void copy_stage(std::uint32_t s_stage, int first_row, int first_m,
                                             int block, int thread) const {
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int k = block * kBlockK + lane * 2;
    const Word word{k, min(max(args.k - k, 0), 2) * 2, lane};
    if (args.x.feed == LinearFeed::kElement) {
      copy_elements(s_stage, word, warp, first_row);
      device::fence_smem_to_async();
      device::mbarrier_arrive(full(ring.slot));
      return;
    }
    if (args.x.feed == LinearFeed::kAsync) {
      copy_rows<kTileRows, 1>(args.x, s_stage, word, warp, first_row);
    }
    if (args.w.feed == LinearFeed::kAsync) {
#pragma unroll 1
      for (int r = 0; r < 4; ++r) {
        copy_rows<kTileM / 4, 4>(args.w,
                                 s_stage + (kTileRows + r * (kTileM / 4)) * Traits::kRowBytes, word,
                                 warp, first_m + r);
      }
    }
    device::copy_async_arrive(full(ring.slot));
  }

  __device__ __forceinline__ void produce_tile(const Sm90Maps& maps, int first_row, int first_m,
                                               int thread) {
    for (int block = first_block; block < end_block; ++block) {
      device::mbarrier_wait(empty(ring.slot), ring.phase ^ 1);
      const std::uint32_t s_stage = device::smem_address(shared.stages[ring.slot]);
      if (thread == 0 && tma_bytes() > 0) {
        load_by_tma(maps, s_stage, first_row, first_m, block * kBlockK);
      }
      if (has_copies()) copy_stage(s_stage, first_row, first_m, block, thread);
      ring.advance();
    }
  }

  // One arrival per warp: a warp knows only of its own share of the asynchronous reads.
  __device__ __forceinline__ void release(int s, int lane) const {
    if (lane == 0) device::mbarrier_arrive(empty(s));
    __syncwarp();
  }

  template <int kSteps>
  __device__ __forceinline__ void multiply(float (&acc)[kTileM / 2], int consumer,
                                           int accumulate) const {
    const std::uint32_t s_stage = device::smem_address(shared.stages[ring.slot]);
    const std::uint64_t x =
        device::wgmma_descriptor_k_major_128b(s_stage + consumer * 64 * Traits::kRowBytes);
    const std::uint64_t w =
        device::wgmma_descriptor_k_major_128b(s_stage + kTileRows * Traits::kRowBytes);
    device::fence_registers(acc);
    device::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      device::wgmma_m64k16<Element, kTileM, false>(acc, x + s * device::kWgmmaStepKMajor,
                                                   w + s * device::kWgmmaStepKMajor,
                                                   s > 0 ? 1 : accumulate);
    }
    device::wgmma_commit();
    device::fence_registers(acc);
  }

  __device__ __forceinline__ void multiply_last(float (&acc)[kTileM / 2], int consumer,
                                                int num_steps, int accumulate) const {
    switch (num_steps) {
      case 1:
        return multiply<1>(acc, consumer, accumulate);
      case 2:
        return multiply<2>(acc, consumer, accumulate);
      case 3:
        return multiply<3>(acc, consumer, accumulate);
      default:
        return multiply<4>(acc, consumer, accumulate);
    }
  }

  __device__ __forceinline__ void wait_full() const {
    device::mbarrier_wait(full(ring.slot), ring.phase);
    // What threads copied is read by wgmma, which is asynchronous.
    if (has_copies()) device::fence_smem_to_async();
  }

  // acc = the sum over the tile's blocks of k. One block stays in flight; none afterwards. Calls
  // `fetch` while the last two are.
  template <typename Fetch>
  __device__ __forceinline__ void consume_tile(float (&acc)[kTileM / 2], int consumer, int lane,
                                               Fetch&& fetch) {
    int previous = 0;
    const int last = end_block - 1;
#pragma unroll 1
    for (int block = first_block; block < last; ++block) {
      wait_full();
      multiply<kBlockK / 16>(acc, consumer, block > first_block);
      if (block > first_block) {
        device::wgmma_wait<1>();
        release(previous, lane);
      }
      previous = ring.slot;
      ring.advance();
    }
    const int num_steps = (min(args.k - last * kBlockK, kBlockK) + 15) / 16;
    wait_full();
    multiply_last(acc, consumer, num_steps, last > first_block);
    fetch();
    device::wgmma_wait<0>();
    device::fence_registers(acc);
    if (last > first_block) release(previous, lane);
    release(ring.slot, lane);
    ring.advance();
  }
};

}  // namespace ikbo::linear_impl
