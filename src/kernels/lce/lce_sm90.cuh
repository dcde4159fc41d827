// SPDX-License-Identifier: Apache-2.0
// LCE on Hopper: persistent, warp-specialised, TMA and wgmma.
//
// Transposed roles: D[n, m] = E[b]^T W^T, so that N (contiguous in E and in the output) lies on the
// rows of the matrix instruction and M, the odd size, on its columns, which come in steps of 8.
// One unit is one candidate x one slice of 64 columns of N. A CTA has `kConsumers` consumer
// warpgroups, each with one unit, that share the weight tile (kTileM rows of W), and one producer
// warp:
//   producer   waits for an empty stage, then loads kConsumers tiles of E (3-D tensor map: k past K
//              is zero-filled, never the next candidate's rows) and the weight tile.
//   consumers  wait for a full stage, issue wgmma, release the stage before; at the end of a tile
//              add the user's partial in fp32, round, transpose through shared memory, TMA store.
// No cluster: sharing the weight tile by multicast reads fewer bytes from L2, but couples two CTAs'
// pipelines and is slower (docs/kernels/lce.md).
// The user stage is the same main loop over E_user; it leaves fp32 partials in the order in which
// the consumers hold them ("fragment order"), so that a candidate's tile adds them with coalesced
// 16-byte loads and no transposition:
//   user_partial[u][tile][slice][kTileM / 8][128 threads] float4
// Programmatic dependent launch: the candidate grid starts while the user grid runs and waits for
// it only before it reads the first partial.
#pragma once

#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma.cuh"
#include "kernels/lce/lce_layout.h"

namespace ikbo::lce_impl {

enum class Stage { kUser, kCandidate };

struct Sm90Args {
  float4* user_partial;              // written by the user stage, read by the candidate stage
  const void* bias;                  // [M], user stage; may be nullptr
  const std::int32_t* cand_to_user;  // [B], candidate stage
  int m;
  int num_units;   // batch x num_slices
  int num_slices;  // ceil(N / 64)
  int num_tiles_m;
  int num_blocks_k;  // ceil(K / 32)
  int last_steps_k;  // steps of 16 k in the last block, 1 or 2
};

template <typename ElementT, int kTileMT, int kConsumersT, Stage kStageT>
struct Sm90Traits {
  using Element = ElementT;
  static constexpr int kTileM = kTileMT;
  static constexpr int kConsumers = kConsumersT;
  static constexpr Stage kStage = kStageT;
  static constexpr int kNumThreads = (kConsumers + 1) * kThreads;
  static constexpr int kTileEBytes = kBlockK * kSliceN * 2;
  static constexpr int kTileWBytes = kTileM * kBlockK * 2;
  static constexpr int kStageBytes = kConsumers * kTileEBytes + kTileWBytes;
  static constexpr int kStagingBytes = kStage == Stage::kCandidate ? kTileM * kSliceN * 2 : 0;
  static constexpr int kMaxSharedBytes = 232448 - 1024;  // 227 KB less the base's alignment
  static constexpr int kFit = (kMaxSharedBytes - kConsumers * kStagingBytes - 256) / kStageBytes;
  static constexpr int kNumStages = kFit < 12 ? kFit : 12;
  static_assert(kNumStages >= 2);

  struct SharedStorage {
    alignas(1024) unsigned char stages[kNumStages][kStageBytes];
    alignas(1024) unsigned char staging[kConsumers][kStagingBytes == 0 ? 1024 : kStagingBytes];
    std::uint64_t full[kNumStages];
    std::uint64_t empty[kNumStages];
    std::uint64_t user_full[kConsumers];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage) + 1024;
  static_assert(kSharedBytes <= 232448);
};

// Position in the ring of stages; `phase` flips at each lap.
struct RingPosition {
  int stage = 0;
  int phase = 0;

  template <int kNumStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kNumStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <typename Traits>
struct LceSm90 {
  using Element = typename Traits::Element;
  using Shared = typename Traits::SharedStorage;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kFragments = kTileM / 8;  // float4 per thread
  static constexpr int kPrefetched =
      kFragments / 2;                    // through registers; the others through staging
  static constexpr int kFetchBlock = 4;  // block of k at which a tile asks for its user's partial
  static constexpr int kPrefetchBlocks = 4;  // blocks before the last at which registers are loaded

  const Sm90Args& args;
  const CUtensorMap* map_e;
  const CUtensorMap* map_w;
  const CUtensorMap* map_out;
  Shared& shared;
  int first_tile;
  int tile_stride;
  int num_tiles;

  __device__ __forceinline__ std::uint32_t full(int stage) const {
    return device::smem_address(&shared.full[stage]);
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const {
    return device::smem_address(&shared.empty[stage]);
  }
  __device__ __forceinline__ std::uint32_t user_full(int consumer) const {
    return device::smem_address(&shared.user_full[consumer]);
  }
  // First unit of a tile for this CTA: tiles with the same group and different rows of M are
  // neighbours, so that the second read of E hits L2.
  __device__ __forceinline__ int first_unit(int tile) const {
    return tile / args.num_tiles_m * kConsumers;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < kStages; ++s) {
      device::mbarrier_init(full(s), 1);
      device::mbarrier_init(empty(s), kConsumers * (kThreads / 32));
    }
    for (int c = 0; c < kConsumers; ++c) device::mbarrier_init(user_full(c), 1);
    device::mbarrier_init_fence();
  }

  // Where the units of one tile lie in E.
  struct UnitOrigins {
    int n[kConsumers];
    int batch[kConsumers];
  };

  __device__ __forceinline__ void load_stage(int stage, const UnitOrigins& origins, int tile_m,
                                             int block_k) const {
    const std::uint32_t s_stage = device::smem_address(shared.stages[stage]);
    const std::uint32_t barrier = full(stage);
    device::mbarrier_arrive_expect_bytes(barrier, Traits::kStageBytes);
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      device::tma_load_3d(s_stage + c * Traits::kTileEBytes, map_e, barrier, origins.n[c],
                          block_k * kBlockK, origins.batch[c]);
    }
    // The packed weight is read as rows of 512 B.
    constexpr int kRows = Traits::kTileWBytes / kPackedRowBytes;
    device::tma_load_3d(s_stage + kConsumers * Traits::kTileEBytes, map_w, barrier, 0,
                        (tile_m * args.num_blocks_k + block_k) * kRows, 0);
  }

  __device__ __forceinline__ void produce() const {
    RingPosition ring;
    for (int tile = first_tile; tile < num_tiles; tile += tile_stride) {
      // NOTE: the divisions stay out of the k loop: the one producing thread must keep ahead.
      UnitOrigins origins;
#pragma unroll
      for (int c = 0; c < kConsumers; ++c) {
        const int unit = min(first_unit(tile) + c, args.num_units - 1);
        origins.n[c] = unit % args.num_slices * kSliceN;
        origins.batch[c] = unit / args.num_slices;
      }
      const int tile_m = tile % args.num_tiles_m;
      for (int k = 0; k < args.num_blocks_k; ++k) {
        device::mbarrier_wait(empty(ring.stage), ring.phase ^ 1);
        load_stage(ring.stage, origins, tile_m, k);
        ring.template advance<kStages>();
      }
    }
  }

  // One arrival per warp: a warp knows only of its own share of the asynchronous reads.
  __device__ __forceinline__ void release(int stage, int lane) const {
    if (lane == 0) device::mbarrier_arrive(empty(stage));
    __syncwarp();
  }

  template <int kSteps>
  __device__ __forceinline__ void multiply(float (&acc)[kTileM / 2], int stage, int consumer,
                                           int num_steps, int accumulate) const {
    const std::uint32_t s_stage = device::smem_address(shared.stages[stage]);
    const std::uint64_t e =
        device::wgmma_descriptor_mn_major(s_stage + consumer * Traits::kTileEBytes);
    const std::uint64_t w =
        device::wgmma_descriptor_k_major(s_stage + kConsumers * Traits::kTileEBytes);
    device::fence_registers(acc);
    device::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s < num_steps) {
        device::wgmma_m64k16<Element, kTileM>(acc, e + s * device::kWgmmaStepMnMajor,
                                              w + s * device::kWgmmaStepKMajor,
                                              s > 0 ? 1 : accumulate);
      }
    }
    device::wgmma_commit();
    device::fence_registers(acc);
  }

  // Blocks [begin, end) of a tile, each with all its steps. One block stays in flight.
  __device__ __forceinline__ void run_blocks(float (&acc)[kTileM / 2], RingPosition& ring,
                                             int& previous, int consumer, int lane, int begin,
                                             int end) const {
    constexpr int kSteps = kBlockK / 16;
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      device::mbarrier_wait(full(ring.stage), ring.phase);
      multiply<kSteps>(acc, ring.stage, consumer, kSteps, k > 0);
      if (k > 0) {
        device::wgmma_wait<1>();
        release(previous, lane);
      }
      previous = ring.stage;
      ring.template advance<kStages>();
    }
  }

  // The last block, which may have fewer steps; nothing is in flight afterwards.
  __device__ __forceinline__ void run_last_block(float (&acc)[kTileM / 2], RingPosition& ring,
                                                 int previous, int consumer, int lane) const {
    const bool is_first = args.num_blocks_k == 1;
    device::mbarrier_wait(full(ring.stage), ring.phase);
    multiply<kBlockK / 16>(acc, ring.stage, consumer, args.last_steps_k, !is_first);
    if (!is_first) {
      device::wgmma_wait<1>();
      release(previous, lane);
    }
    device::wgmma_wait<0>();
    device::fence_registers(acc);
    release(ring.stage, lane);
    ring.template advance<kStages>();
  }

  __device__ __forceinline__ const float4* partial_of(int user, int tile_m, int slice,
                                                      int thread) const {
    return args.user_partial +
           ((static_cast<std::size_t>(user) * args.num_tiles_m + tile_m) * args.num_slices +
            slice) *
               (kFragments * kThreads) +
           thread;
  }

  __device__ __forceinline__ void store_partial(float (&acc)[kTileM / 2], int unit, int tile_m,
                                                int thread) const {
    auto* g_partial = const_cast<float4*>(
        partial_of(unit / args.num_slices, tile_m, unit % args.num_slices, thread));
    const auto* g_bias = static_cast<const Element*>(args.bias);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const int m = tile_m * kTileM + i * 8 + (thread % 4) * 2;
      const float b0 = g_bias != nullptr && m < args.m ? static_cast<float>(g_bias[m]) : 0.0f;
      const float b1 =
          g_bias != nullptr && m + 1 < args.m ? static_cast<float>(g_bias[m + 1]) : 0.0f;
      g_partial[i * kThreads] = make_float4(acc[4 * i] + b0, acc[4 * i + 1] + b1,
                                            acc[4 * i + 2] + b0, acc[4 * i + 3] + b1);
    }
  }

  __device__ __forceinline__ static std::uint32_t round_pair(float low, float high) {
    if constexpr (std::is_same_v<Element, __half>) {
      const __half2 pair = __floats2half2_rn(low, high);
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }

  // Rounds fragments [i, i + 2) and stores 16 rows of m x 64 n (this warp's 16) to staging.
  __device__ __forceinline__ void stage_pair(const float* d, int i, std::uint32_t s_staging,
                                             int thread) const {
    const int lane = thread % 32;
    const int warp = thread / 32;
    // Matrices of 8 x 8: (m 0-7, n 0-7), (m 0-7, n 8-15), (m 8-15, n 0-7), (m 8-15, n 8-15).
    const int row = i * 8 + ((lane >> 4) << 3) + (lane & 7);
    const int chunk = warp * 2 + ((lane >> 3) & 1);
    const std::uint32_t address = s_staging + row * 128 + ((chunk ^ (row & 7)) << 4);
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(round_pair(d[0], d[1])), "r"(round_pair(d[2], d[3])), "r"(round_pair(d[4], d[5])),
        "r"(round_pair(d[6], d[7]))
        : "memory");
  }

  __device__ __forceinline__ static void add(float* d, float4 partial) {
    d[0] += partial.x;
    d[1] += partial.y;
    d[2] += partial.z;
    d[3] += partial.w;
  }

  __device__ __forceinline__ void consume_user(int consumer, int thread) const {
    float acc[kTileM / 2];
    RingPosition ring;
    for (int tile = first_tile; tile < num_tiles; tile += tile_stride) {
      int previous = 0;
      const int last = args.num_blocks_k - 1;
      run_blocks(acc, ring, previous, consumer, thread % 32, 0, last);
      run_last_block(acc, ring, previous, consumer, thread % 32);
      const int unit = first_unit(tile) + consumer;
      if (unit < args.num_units) store_partial(acc, unit, tile % args.num_tiles_m, thread);
    }
  }

  // Starts the copy of the first half of the user's fragments into the staging buffer, which is
  // free once the store of the tile before has read it.
  __device__ __forceinline__ void fetch_partial(int consumer, const float4* g_partial) const {
    device::tma_store_wait_read();
    device::mbarrier_arrive_expect_bytes(user_full(consumer), Traits::kStagingBytes);
    device::bulk_load(device::smem_address(shared.staging[consumer]), g_partial,
                      Traits::kStagingBytes, user_full(consumer));
  }

  // Adds the user's partial to a finished tile, rounds, and stores the tile.
  __device__ __forceinline__ void finish_tile(float (&acc)[kTileM / 2],
                                              const float4 (&prefetched)[kPrefetched], int phase,
                                              int consumer, int thread) const {
    device::mbarrier_wait(user_full(consumer), phase);
    const auto* s_partial = reinterpret_cast<const float4*>(shared.staging[consumer]) + thread;
#pragma unroll
    for (int i = 0; i < kPrefetched; ++i) add(acc + 4 * i, s_partial[i * kThreads]);
#pragma unroll
    for (int i = 0; i < kPrefetched; ++i) add(acc + 4 * (kPrefetched + i), prefetched[i]);
    device::named_barrier_sync(1 + consumer, kThreads);
    const std::uint32_t s_staging = device::smem_address(shared.staging[consumer]);
#pragma unroll
    for (int i = 0; i < kFragments; i += 2) stage_pair(acc + 4 * i, i, s_staging, thread);
    device::fence_smem_to_async();
    device::named_barrier_sync(1 + consumer, kThreads);
  }

  __device__ __forceinline__ void consume_candidate(int consumer, int thread) const {
    float acc[kTileM / 2];
    RingPosition ring;
    int phase = 0;
    const int last = args.num_blocks_k - 1;
    for (int tile = first_tile; tile < num_tiles; tile += tile_stride) {
      const int unit = first_unit(tile) + consumer;
      const int tile_m = tile % args.num_tiles_m;
      const int clamped = min(unit, args.num_units - 1);
      const int candidate = clamped / args.num_slices;
      const int slice = clamped % args.num_slices;
      const float4* g_partial = partial_of(args.cand_to_user[candidate], tile_m, slice, 0);
      // The first tile's partials may still be in the making: it asks for them as late as it can.
      const bool is_first = tile == first_tile;
      const int fetch_block = is_first ? last : min(kFetchBlock, last);
      const int prefetch_block = is_first ? last : max(fetch_block, last - kPrefetchBlocks);

      int previous = 0;
      float4 prefetched[kPrefetched];
      run_blocks(acc, ring, previous, consumer, thread % 32, 0, fetch_block);
      if (is_first) device::grid_dependency_wait();
      if (thread == 0) fetch_partial(consumer, g_partial);
      __syncwarp();
      run_blocks(acc, ring, previous, consumer, thread % 32, fetch_block, prefetch_block);
#pragma unroll
      for (int i = 0; i < kPrefetched; ++i) {
        prefetched[i] = g_partial[(kPrefetched + i) * kThreads + thread];
      }
      run_blocks(acc, ring, previous, consumer, thread % 32, prefetch_block, last);
      run_last_block(acc, ring, previous, consumer, thread % 32);

      finish_tile(acc, prefetched, phase, consumer, thread);
      phase ^= 1;
      if (thread == 0 && unit < args.num_units) {
        device::tma_store_3d(map_out, device::smem_address(shared.staging[consumer]),
                             slice * kSliceN, tile_m * kTileM, candidate);
        device::tma_store_commit();
      }
    }
    if (thread == 0) device::tma_store_wait();
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNumThreads, 1)
    lce_sm90_kernel(const __grid_constant__ Sm90Args args,
                    const __grid_constant__ CUtensorMap map_e,
                    const __grid_constant__ CUtensorMap map_w,
                    const __grid_constant__ CUtensorMap map_out) {
  extern __shared__ unsigned char s_raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(
      s_raw + ((1024 - device::smem_address(s_raw) % 1024) % 1024));
  constexpr int kConsumers = Traits::kConsumers;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kThreads, 0);
  const int groups = (args.num_units + kConsumers - 1) / kConsumers;
  const LceSm90<Traits> lce{.args = args,
                            .map_e = &map_e,
                            .map_w = &map_w,
                            .map_out = &map_out,
                            .shared = shared,
                            .first_tile = static_cast<int>(blockIdx.x),
                            .tile_stride = static_cast<int>(gridDim.x),
                            .num_tiles = groups * args.num_tiles_m};
  if constexpr (Traits::kStage == Stage::kUser) {
    // The candidate grid may start once the packed weights are there.
    device::grid_dependency_wait();
    device::grid_dependency_launch();
  }
  if (threadIdx.x == 0) {
    lce.init_barriers();
    device::prefetch_tensor_map(&map_e);
    device::prefetch_tensor_map(&map_w);
  }
  __syncthreads();

  if (warpgroup == kConsumers) {
    if constexpr (kConsumers > 1) device::registers_decrease<40>();
    if (threadIdx.x == kConsumers * kThreads) lce.produce();
  } else {
    if constexpr (kConsumers > 1) device::registers_increase<232>();
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    if constexpr (Traits::kStage == Stage::kUser) {
      lce.consume_user(warpgroup, thread);
    } else {
      lce.consume_candidate(warpgroup, thread);
    }
  }
}

}  // namespace ikbo::lce_impl
