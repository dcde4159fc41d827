// SPDX-License-Identifier: Apache-2.0
// One stage (user or candidate) of linear on Hopper: D[rows, M] = X W^T by TMA and wgmma.
//
// A CTA has `kConsumers` consumer warpgroups, each with 64 rows of X against the same kTileM rows
// of W, and one producer warp:
//   producer   waits for an empty stage, then loads 64 k of the tile's rows of X and of W.
//   consumers  wait for a full stage, issue wgmma, release the stage before; at the end of a tile
//              they run the stage's epilogue (linear_sm90_epilogue.cuh) from their registers.
// CTAs are persistent over tiles, or a cluster of them shares one tile's sum over k (split_k).
//
// Rows come in groups (RowBoxes): row g * G + r of a tensor lies at residue r of group g, and one
// box takes one residue of consecutive groups. Two reasons:
//   X: the copy engine wants strides of 16 bytes. A group of G rows has such a stride when one row
//      has not (K = 866), and a box may start at any element of it.
//   W: with G = 4, a thread's accumulators of 32 columns hold 8 neighbours in M, so that partials
//      are read and outputs written 16 bytes a thread, with no exchange between threads.
// A box of a group whose rows are not 16-byte aligned runs into the next row past K. There the
// consumers clear both operands' tails in shared memory before the last block's wgmma: a NaN of one
// row must not reach another through 0 * NaN.
// Programmatic dependent launch: the candidate grid starts while the user grid runs and waits for
// it only before it reads the first partial.
#pragma once

#include "kernels/device/ptx_cluster.cuh"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma.cuh"
#include "kernels/linear/linear_layout.h"

namespace ikbo::linear_impl {

// How a tile's rows are found through two tensor maps (innermost: elements of a group; rows of a
// group; groups). The first map holds every group that has residue r < remainder, the second the
// groups that have all G residues: neither reads past the last row.
struct RowBoxes {
  int log2_group;
  int remainder;  // rows of the last group, 1..G
  int offset;     // elements from the map's base, which is 16-byte aligned, to the first row
  int x_step;     // per residue: elements along a group, where its rows are not 16-byte aligned,
  int y_step;     // else 1 row
};

struct Sm90Args {
  RowBoxes x;
  RowBoxes w;
  float* user_partial;               // [U, partial_columns]; written by the user stage
  std::int64_t partial_columns;      // read by the candidate stage
  const void* bias;                  // [M], user stage; may be nullptr
  const std::int32_t* cand_to_user;  // [B]; nullptr in the user stage
  void* out;                         // [B, M]
  Activation activation;
  int m;
  int num_rows;
  int num_tiles;
  int num_tiles_m;
  int num_blocks_k;  // ceil(K / 64)
  int last_k;        // k of the last block, 1..64
  int split_k;       // at most num_blocks_k
  bool clears_x;     // tails of X (W) in the last block are not zero yet
  bool clears_w;
};

struct Sm90Maps {
  const CUtensorMap* x;
  const CUtensorMap* x_full;
  const CUtensorMap* w;
  const CUtensorMap* w_full;
};

template <typename ElementT, int kTileMT, int kConsumersT>
struct Sm90Traits {
  using Element = ElementT;
  static constexpr int kTileM = kTileMT;
  static constexpr int kConsumers = kConsumersT;
  static constexpr int kTileRows = 64 * kConsumers;
  // One small tile leaves room for a second CTA; two consumers want the producer's registers.
  static constexpr int kCtasPerSm = kConsumers == 1 ? 2 : 1;
  static constexpr int kNumThreads = kConsumers == 1 ? kThreads + 32 : (kConsumers + 1) * kThreads;
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
  int stage = 0;  // position in the ring; `phase` flips at each lap
  int phase = 0;

  __device__ __forceinline__ std::uint32_t full(int s) const {
    return device::smem_address(&shared.full[s]);
  }
  __device__ __forceinline__ std::uint32_t empty(int s) const {
    return device::smem_address(&shared.empty[s]);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < kStages; ++s) {
      device::mbarrier_init(full(s), 1);
      device::mbarrier_init(empty(s), kConsumerThreads / 32);
    }
    device::mbarrier_init_fence();
  }

  // One box per residue; residue r's rows follow those of r - 1 in shared memory.
  __device__ __forceinline__ void load_rows(std::uint32_t s_rows, const RowBoxes& boxes,
                                            const CUtensorMap* map, const CUtensorMap* map_full,
                                            int tile_rows, int first_row, int k) const {
    const int box_bytes = (tile_rows >> boxes.log2_group) * Traits::kRowBytes;
    for (int r = 0; r < 1 << boxes.log2_group; ++r) {
      device::tma_load_3d(s_rows + r * box_bytes, r < boxes.remainder ? map : map_full, full(stage),
                          boxes.offset + r * boxes.x_step + k, r * boxes.y_step,
                          first_row >> boxes.log2_group);
    }
  }

  __device__ __forceinline__ void produce_tile(const Sm90Maps& maps, int first_row, int first_m) {
    for (int block = first_block; block < end_block; ++block) {
      device::mbarrier_wait(empty(stage), phase ^ 1);
      device::mbarrier_arrive_expect_bytes(full(stage), Traits::kStageBytes);
      const std::uint32_t s_stage = device::smem_address(shared.stages[stage]);
      load_rows(s_stage, args.x, maps.x, maps.x_full, kTileRows, first_row, block * kBlockK);
      load_rows(s_stage + kTileRows * Traits::kRowBytes, args.w, maps.w, maps.w_full, kTileM,
                first_m, block * kBlockK);
      advance();
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
    const std::uint32_t s_stage = device::smem_address(shared.stages[stage]);
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

  // Zeroes [last_k, 16 * num_steps) of every row that needs it, by all consumer threads.
  __device__ __forceinline__ void clear_tails(int num_steps) const {
    const int begin = args.clears_x ? 0 : kTileRows;
    const int end = args.clears_w ? kTileRows + kTileM : kTileRows;
    for (int row = begin + static_cast<int>(threadIdx.x); row < end; row += kConsumerThreads) {
      auto* s_row = reinterpret_cast<uint4*>(shared.stages[stage] + row * Traits::kRowBytes);
      for (int chunk = args.last_k / 8; chunk < 2 * num_steps; ++chunk) {
        const int kept = max(args.last_k - chunk * 8, 0);  // elements of 16 bits, 0..7
        uint4 v = s_row[chunk ^ (row & 7)];
        const auto masked = [kept](std::uint32_t word, int i) {
          const int n = kept - 2 * i;
          return n >= 2 ? word : n == 1 ? word & 0xFFFFu : 0u;
        };
        v = {masked(v.x, 0), masked(v.y, 1), masked(v.z, 2), masked(v.w, 3)};
        s_row[chunk ^ (row & 7)] = v;
      }
    }
    device::fence_smem_to_async();
    device::named_barrier_sync(1, kConsumerThreads);
  }

  // acc (+)= the tile's blocks of k. One block stays in flight; none afterwards.
  __device__ __forceinline__ void consume_tile(float (&acc)[kTileM / 2], int consumer, int lane,
                                               bool accumulate) {
    int previous = 0;
    const int last = end_block - 1;
#pragma unroll 1
    for (int block = first_block; block < last; ++block) {
      device::mbarrier_wait(full(stage), phase);
      multiply<kBlockK / 16>(acc, consumer, accumulate || block > first_block);
      if (block > first_block) {
        device::wgmma_wait<1>();
        release(previous, lane);
      }
      previous = stage;
      advance();
    }
    const int num_steps = end_block == args.num_blocks_k ? (args.last_k + 15) / 16 : kBlockK / 16;
    device::mbarrier_wait(full(stage), phase);
    if (end_block == args.num_blocks_k && (args.clears_x || args.clears_w)) clear_tails(num_steps);
    multiply_last(acc, consumer, num_steps, accumulate || last > first_block);
    device::wgmma_wait<0>();
    device::fence_registers(acc);
    if (last > first_block) release(previous, lane);
    release(stage, lane);
    advance();
  }
};

}  // namespace ikbo::linear_impl
