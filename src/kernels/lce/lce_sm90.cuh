// SPDX-License-Identifier: Apache-2.0
// LCE on Hopper: persistent, warp-specialised, TMA and wgmma.
//
// Transposed roles: D[n, m] = E[b]^T W^T, so that N (contiguous in E and in the output) lies on the
// rows of the matrix instruction and M, the odd size, on its columns, which come in steps of 8.
// A tile is one batch entry x 64 columns of N (a slice) x kTileM rows of M. A CTA has kConsumers
// consumer warpgroups, each with one tile, that share the weight tile, and one producer warp:
//   producer   waits for an empty stage, then loads kConsumers tiles of E (3-D tensor maps: k past
//              K is zero-filled, never the next entry's rows) and the weight tile.
//   consumers  wait for a full stage, issue wgmma, release the stage before; at the end of a tile
//              add what the user contributes in fp32, round, transpose through shared memory and
//              store by TMA (lce_sm90_epilogue.cuh).
// k runs over the parts of the candidate side one after the other: a list of tensors is read in
// place.
// A CTA keeps its slice and rows of M over a whole chunk of the batch: tiles of one user that
// follow each other use one copy of its partial. CTAs of the same chunk walk it side by side, so
// that E leaves HBM once.
// Programmatic dependent launch: the candidate grid starts while the user grid runs and waits for
// it only before it reads the first partial.
#pragma once

#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma.cuh"
#include "kernels/device/ring_position.cuh"
#include "kernels/device/smem_address.cuh"
#include "kernels/lce/lce_sm90_epilogue.cuh"
#include "kernels/lce/lce_sm90_traits.cuh"

namespace ikbo::lce_impl {

template <typename Traits>
struct LceSm90 {
  using Element = typename Traits::Element;
  using Ring = device::FixedRingPosition<Traits::kNumStages>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr Stage kStage = Traits::kStage;
  // Blocks before a tile's last at which a new user's partial is asked for.
  static constexpr int kFetchAhead = 4;

  const typename Traits::Params& params;
  typename Traits::SharedStorage& shared;

  __device__ __forceinline__ std::uint32_t full(int stage) const {
    return device::smem_address(&shared.full[stage]);
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return device::smem_address(&shared.empty[stage]);
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < Traits::kNumStages; ++s) {
      device::mbarrier_init(full(s), 1);
      device::mbarrier_init(empty(s), kConsumers * (kThreads / 32));
    }
    for (int c = 0; c < kConsumers; ++c) {
      device::mbarrier_init(device::smem_address(&shared.partial_full[c]), 1);
    }
    device::mbarrier_init_fence();
  }

  // What a CTA does at a time: the entries [begin, end) of the batch, one tile of M, and the slice
  // of consumer 0.
  struct Item {
    int tile_m;
    int slice;
    int begin;
    int end;
  };
  __device__ __forceinline__ Item item_at(int index) const {
    const Sm90Args& args = params.args;
    const int above = index / args.num_tiles_m;
    const int slice_groups = args.num_slices / args.split.slices_per_cta;
    const int chunk = above / slice_groups;
    const int begin = chunk * args.split.chunk_size;
    return {.tile_m = index - above * args.num_tiles_m,
            .slice = (above - chunk * slice_groups) * args.split.slices_per_cta,
            .begin = begin,
            .end = min(begin + args.split.chunk_size, args.batch)};
  }
  // The consumers of a CTA lie side by side along N or along the batch.
  __device__ __forceinline__ bool along_n() const {
    return params.args.split.slices_per_cta == kConsumers;
  }
  __device__ __forceinline__ int batch_step() const { return along_n() ? 1 : kConsumers; }
  __device__ __forceinline__ int batch_of(int b, int consumer) const {
    return along_n() ? b : b + consumer;
  }
  __device__ __forceinline__ int slice_of(const Item& item, int consumer) const {
    return along_n() ? item.slice + consumer : item.slice;
  }
  __device__ __forceinline__ int user_of(int b) const {
    return params.args.cand_to_user[min(b, params.args.batch - 1)];
  }

  // Rows of 512 B that hold one tile of the packed weight.
  static constexpr int kWeightRows = Traits::kTileWBytes / kPackedRowBytes;

  __device__ __forceinline__ void load_stage(int stage, const CUtensorMap* map_e, const int (&n)[2],
                                             int k, const int (&entry)[2], const CUtensorMap* map_w,
                                             int weight_row) const {
    const std::uint32_t s_stage = device::smem_address(shared.stages[stage]);
    device::mbarrier_arrive_expect_bytes(full(stage), Traits::kStageBytes);
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      // Past the end of the batch the box is zeros.
      device::tma_load_3d(s_stage + c * Traits::kTileEBytes, map_e, full(stage), n[c], k, entry[c]);
    }
    device::tma_load_3d(s_stage + kConsumers * Traits::kTileEBytes, map_w, full(stage), 0,
                        weight_row, 0);
  }

  __device__ __forceinline__ void produce() const {
    const Sm90Args& args = params.args;
    Ring ring;
    if constexpr (kStage != Stage::kCandidate) {
      device::grid_dependency_wait();
      if constexpr (kStage == Stage::kUser) device::grid_dependency_launch();
    }
    for (int index = static_cast<int>(blockIdx.x); index < args.split.num_items;
         index += gridDim.x) {
      const Item item = item_at(index);
      // NOTE: nothing but waits and loads inside the loops over k: the one thread must keep ahead.
      int n[2];
      for (int c = 0; c < kConsumers; ++c) n[c] = slice_of(item, c) * kSliceN;
      for (int b = item.begin; b < item.end; b += batch_step()) {
        int entry[2];
        for (int c = 0; c < kConsumers; ++c) entry[c] = batch_of(b, c);
        [[maybe_unused]] int user[2];
        if constexpr (kStage == Stage::kDual) {
          for (int c = 0; c < kConsumers; ++c) user[c] = user_of(entry[c]);
        }
        int weight_row = item.tile_m * args.num_blocks_k * kWeightRows;
        for (int part = 0; part < args.num_parts; ++part) {
          const bool is_user = kStage == Stage::kDual && part == 0;
          const int blocks = params.parts[part].num_blocks;
          int rows_of[2];
          for (int c = 0; c < kConsumers; ++c) rows_of[c] = entry[c];
          if constexpr (kStage == Stage::kDual) {
            for (int c = 0; c < kConsumers; ++c) rows_of[c] = is_user ? user[c] : entry[c];
            const int blocks_of_image = is_user ? blocks : args.num_blocks_k - weight_split();
            weight_row = item.tile_m * blocks_of_image * kWeightRows;
          }
          for (int k = 0; k < blocks; ++k) {
            device::mbarrier_wait(empty(ring.slot), ring.phase ^ 1);
            load_stage(ring.slot, &params.e[part], n, k * kBlockK, rows_of,
                       &params.w[kStage == Stage::kDual && !is_user], weight_row);
            weight_row += kWeightRows;
            ring.advance();
          }
        }
      }
    }
  }
  // Blocks of k that the user's weight has; the others are the candidate's.
  __device__ __forceinline__ int weight_split() const { return params.parts[0].num_blocks; }

  // One arrival per warp: a warp knows only of its own share of the asynchronous reads.
  __device__ __forceinline__ void release(int& oldest, int lane) const {
    if (lane == 0) device::mbarrier_arrive(empty(oldest));
    __syncwarp();
    if (++oldest == Traits::kNumStages) oldest = 0;
  }

  template <int kSteps>
  __device__ __forceinline__ void multiply(float (&acc)[kTileM / 2], int stage, int consumer,
                                           int accumulate) const {
    const std::uint32_t s_stage = device::smem_address(shared.stages[stage]);
    const std::uint64_t e =
        device::wgmma_descriptor_mn_major(s_stage + consumer * Traits::kTileEBytes);
    const std::uint64_t w =
        device::wgmma_descriptor_k_major(s_stage + kConsumers * Traits::kTileEBytes);
    device::fence_registers(acc);
    device::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      device::wgmma_m64k16<Element, kTileM>(acc, e + s * device::kWgmmaStepMnMajor,
                                            w + s * device::kWgmmaStepKMajor,
                                            s > 0 ? 1 : accumulate);
    }
    device::wgmma_commit();
    device::fence_registers(acc);
  }

  // Blocks [begin, end) of a tile, each with all its steps.
  __device__ __forceinline__ void run_blocks(float (&acc)[kTileM / 2], Ring& ring, int& oldest,
                                             int consumer, int lane, int begin, int end) const {
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      device::mbarrier_wait(full(ring.slot), ring.phase);
      multiply<kBlockK / 16>(acc, ring.slot, consumer, k > 0);
      ring.advance();
      if (k >= Traits::kPending) {
        device::wgmma_wait<Traits::kPending>();
        release(oldest, lane);
      }
    }
  }

  // All blocks of k of a tile; calls `fetch` once, before block `fetch_block`. Nothing is in flight
  // afterwards.
  // NOTE: the blocks with all their steps have a loop of their own, with nothing in it: what stands
  // between two multiplications of one warpgroup must take less time than one of the other's.
  template <typename Fetch>
  __device__ __forceinline__ void run_tile(float (&acc)[kTileM / 2], Ring& ring, int consumer,
                                           int lane, int fetch_block, Fetch&& fetch) const {
    int oldest = ring.slot;  // the stage to release next
    int begin = 0;
    const int num_parts = Traits::kMaxParts == 1 ? 1 : params.args.num_parts;
    for (int part = 0; part < num_parts; ++part) {
      const int last = begin + params.parts[part].num_blocks - 1;
      const int middle = min(max(fetch_block, begin), last);
      run_blocks(acc, ring, oldest, consumer, lane, begin, middle);
      if (fetch_block == middle) fetch();
      run_blocks(acc, ring, oldest, consumer, lane, middle, last);
      device::mbarrier_wait(full(ring.slot), ring.phase);
      if (params.parts[part].last_steps == 1) {
        multiply<1>(acc, ring.slot, consumer, last > 0);
      } else {
        multiply<2>(acc, ring.slot, consumer, last > 0);
      }
      ring.advance();
      if (last >= Traits::kPending && last < params.args.num_blocks_k - 1) {
        device::wgmma_wait<Traits::kPending>();
        release(oldest, lane);
      }
      begin = last + 1;
    }
    device::wgmma_wait<0>();
    device::fence_registers(acc);
    while (oldest != ring.slot) release(oldest, lane);
  }

  __device__ __forceinline__ void consume_user(int consumer, int thread) const {
    const Sm90Epilogue<Traits> epilogue{params.args, &params.out, shared, consumer, thread};
    float acc[kTileM / 2];
    Ring ring;
    for (int index = static_cast<int>(blockIdx.x); index < params.args.split.num_items;
         index += gridDim.x) {
      const Item item = item_at(index);
      for (int b = item.begin; b < item.end; b += batch_step()) {
        run_tile(acc, ring, consumer, thread % 32, -1, [] {});
        const int user = batch_of(b, consumer);
        if (user < params.args.batch) {
          epilogue.store_partial(acc, user, item.tile_m, slice_of(item, consumer));
        }
      }
    }
  }

  __device__ __forceinline__ void consume_candidate(int consumer, int thread) const {
    const Sm90Epilogue<Traits> epilogue{params.args, &params.out, shared, consumer, thread};
    float acc[kTileM / 2];
    float4 in_registers[Traits::kInRegisters];
    Ring ring;
    int phase = 0;
    bool is_first = kStage == Stage::kCandidate;
    const int last = params.args.num_blocks_k - 1;
    for (int index = static_cast<int>(blockIdx.x); index < params.args.split.num_items;
         index += gridDim.x) {
      const Item item = item_at(index);
      const int slice = slice_of(item, consumer);
      int user = -1;  // whose partial is kept
      if constexpr (kStage == Stage::kDual) epilogue.keep_bias(in_registers, item.tile_m);
      for (int b0 = item.begin; b0 < item.end; b0 += batch_step()) {
        const int b = batch_of(b0, consumer);
        const int next_user = kStage == Stage::kDual ? -1 : user_of(b);
        const bool is_new = next_user != user;
        // The first tile's partial may still be in the making: it is asked for last.
        run_tile(acc, ring, consumer, thread % 32, is_first ? last : max(0, last - kFetchAhead),
                 [&] {
                   // Staging is free once the store of the tile before has read it.
                   if (thread == 0) device::tma_store_wait_read();
                   epilogue.sync();
                   if (!is_new) return;
                   if (is_first) device::grid_dependency_wait();
                   epilogue.fetch_partial(in_registers,
                                          epilogue.partial_of(next_user, item.tile_m, slice));
                 });
        if (is_new) {
          epilogue.wait_partial(phase);
          phase ^= 1;
          user = next_user;
          is_first = false;
        }
        epilogue.store_tile(acc, in_registers, b, item.tile_m, slice);
      }
    }
    if (thread == 0) device::tma_store_wait();
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNumThreads, 1)
    lce_sm90_kernel(const __grid_constant__ typename Traits::Params params) {
  extern __shared__ __align__(1024) unsigned char s_raw[];
  static_assert(Traits::kAlignment == 1024);
  if (device::smem_address(s_raw) % Traits::kAlignment != 0) asm volatile("trap;");
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(s_raw);
  constexpr int kConsumers = Traits::kConsumers;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kThreads, 0);
  const LceSm90<Traits> lce{.params = params, .shared = shared};
  if (threadIdx.x == 0) {
    lce.init_barriers();
    device::prefetch_tensor_map(&params.e[0]);
    device::prefetch_tensor_map(&params.w[0]);
  }
  __syncthreads();

  if (warpgroup == kConsumers) {
    if constexpr (kConsumers > 1) device::registers_decrease<24>();
    if (threadIdx.x == kConsumers * kThreads) lce.produce();
  } else {
    if constexpr (kConsumers > 1) device::registers_increase<240>();
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    if constexpr (Traits::kStage == Stage::kUser) {
      lce.consume_user(warpgroup, thread);
    } else {
      lce.consume_candidate(warpgroup, thread);
    }
  }
}

}  // namespace ikbo::lce_impl
