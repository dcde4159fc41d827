// SPDX-License-Identifier: Apache-2.0
// LCE on tensor cores of any architecture since sm_80, 16-bit types, fp32 sums: tiles of kTile rows
// of M by kTile columns, blocks of 32 k in a ring of shared-memory stages.
// Every thread copies and multiplies. Copies of 16 or 4 bytes are asynchronous; single elements
// pass through registers while the thread multiplies. One
// __syncthreads per block: it makes block i visible and frees the stage of block i - 1.
#pragma once

#include <cstdint>

#include "kernels/device/ptx_cp_async.cuh"
#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/smem_address.cuh"
#include "kernels/lce/lce_columns.cuh"
#include "kernels/lce/lce_generic.h"

namespace ikbo::lce_impl {

// kHasSingles: alignment allows one of the operands copies of single elements only.
template <typename ElementType, int kTileEdge, bool kHasSingles>
struct MmaTraits {
  using Element = ElementType;
  static constexpr bool kSingles = kHasSingles;
  static constexpr int kTile = kTileEdge;
  static constexpr int kBlockK = 32;
  static constexpr int kStages = kTile == kLargeTile ? 3 : 4;
  static constexpr int kWarpN = 32;
  static constexpr int kWarpM = kTile / 2;
  static constexpr int kThreads = 32 * 2 * (kTile / kWarpN);
  static constexpr int kCtasPerSm = kTile == kLargeTile ? 2 : kSingles ? 3 : 4;  // by registers
  static constexpr int kMmaM = kWarpM / 16;  // matrix instructions of a warp along M
  static constexpr int kMmaN = kWarpN / 8;
  // Elements that a thread copies in each half of a block, per operand.
  static constexpr int kCopies = kTile * kBlockK / kThreads / 2;

  struct Shared {
    alignas(128) std::uint16_t w[kStages][kTile * kBlockK];
    alignas(128) std::uint16_t e[kStages][kBlockK * kTile];
    Column columns[kTile];
  };

  // Both tiles are swizzled by 16-byte chunks, so that eight rows of a matrix load hit all banks.
  static __device__ __forceinline__ int w_at(int row, int k) {
    return row * kBlockK + ((k / 8) ^ (row / 2 % 4)) * 8 + k % 8;
  }
  static __device__ __forceinline__ int e_at(int k, int column) {
    return k * kTile + ((column / 8) ^ (k % 8)) * 8 + column % 8;
  }
};

// Where the copies of one thread lie in a block of an operand: copy i at row (or column) x + i * dx
// and k + i * dk. Lanes go along the inner dimension of the operand.
struct Walk {
  int x;
  int k;
  int dx;
  int dk;
};

template <typename Traits>
__device__ __forceinline__ Walk make_walk(int width, bool along_k) {
  const int thread = static_cast<int>(threadIdx.x);
  const int shift = width == 8 ? 3 : width == 2 ? 1 : 0;
  if (along_k) {
    const int per_row = Traits::kBlockK >> shift;
    return {thread / per_row, thread % per_row << shift, Traits::kThreads / per_row, 0};
  }
  const int per_row = Traits::kTile >> shift;
  return {thread % per_row << shift, thread / per_row, 0, Traits::kThreads / per_row};
}

// What copies of several elements need, from tile to tile and from block to block.
struct MmaCopies {
  const std::uint16_t* w;  // copy 0 of the next block
  const std::uint16_t* e;
  std::int64_t w_step;  // elements between two copies
  std::int64_t e_step;
  int w_rows;  // copy i of w is one of [M, K] if i * dx is less
  int w_k;     // and w_k is less than what is left of K
  int e_k;     // copy i of e is one of [K, columns] if e_k + i * dk is less than what is left of K
  std::uint32_t s_w;  // bytes into a stage's tile, copy 0
  std::uint32_t s_e;
};

template <typename Traits>
__device__ __forceinline__ MmaCopies make_copies(const StageArgs& args, std::int64_t first_m,
                                                 const Column* s_columns) {
  constexpr int kNever = 1 << 30;
  const Walk w = make_walk<Traits>(args.w_width, true);
  const Walk e = make_walk<Traits>(args.e_width, false);
  const Column& column = s_columns[e.x];
  return {.w = static_cast<const std::uint16_t*>(args.w) + (first_m + w.x) * args.stride_w_m +
               w.k * args.stride_w_k,
          .e = static_cast<const std::uint16_t*>(args.e) + column.e + e.k * args.stride_e_k,
          .w_step = w.dx * args.stride_w_m,
          .e_step = e.dk * args.stride_e_k,
          .w_rows = static_cast<int>(min(args.m - first_m, std::int64_t{Traits::kTile})) - w.x,
          .w_k = w.k,
          .e_k = column.out >= 0 ? e.k : kNever,
          .s_w = static_cast<std::uint32_t>(Traits::w_at(w.x, w.k) * 2),
          .s_e = static_cast<std::uint32_t>(Traits::e_at(e.k, e.x) * 2)};
}

// Byte offsets of a copy in a stage's tile. From copy 0 on, bits of the swizzle flip and whole rows
// are added: copy 0's own row (k) is below what a copy adds, which is a power of 2.
template <typename Traits, int kWidth>
__device__ __forceinline__ std::uint32_t w_copy_at(const MmaCopies& copies, int copy) {
  constexpr int kRows = Traits::kThreads * kWidth / Traits::kBlockK;  // from copy to copy
  static_assert((kRows & (kRows - 1)) == 0);
  const int row = copy * kRows;
  return (copies.s_w ^ (row / 2 % 4 * 16)) + row * Traits::kBlockK * 2;
}

template <typename Traits, int kWidth>
__device__ __forceinline__ std::uint32_t e_copy_at(const MmaCopies& copies, int copy) {
  constexpr int kStep = Traits::kThreads * kWidth / Traits::kTile;  // k from copy to copy
  static_assert((kStep & (kStep - 1)) == 0);
  const int k = copy * kStep;
  return (copies.s_e ^ (k % 8 * 16)) + k * Traits::kTile * 2;
}

template <typename Traits, int kWidth>
__device__ __forceinline__ bool w_copy_is_valid(const MmaCopies& copies, int k_left, int copy) {
  return copies.w_k < k_left &&
         copy * (Traits::kThreads * kWidth / Traits::kBlockK) < copies.w_rows;
}

template <typename Traits, int kWidth>
__device__ __forceinline__ bool e_copy_is_valid(const MmaCopies& copies, int k_left, int copy) {
  return copies.e_k + copy * (Traits::kThreads * kWidth / Traits::kTile) < k_left;
}

// Half `half` of a block of w, asynchronously, kWidth elements a copy; s_w is the stage's tile.
template <typename Traits, int kWidth>
__device__ __forceinline__ void copy_w(const MmaCopies& copies, int k_left, std::uint32_t s_w,
                                       int half) {
  constexpr int kCount = Traits::kCopies / kWidth;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int copy = half * kCount + i;
    const bool is_valid = w_copy_is_valid<Traits, kWidth>(copies, k_left, copy);
    device::copy_async<kWidth * 2>(s_w + w_copy_at<Traits, kWidth>(copies, copy),
                                   copies.w + copy * copies.w_step, is_valid ? kWidth * 2 : 0);
  }
}

template <typename Traits, int kWidth>
__device__ __forceinline__ void copy_e(const MmaCopies& copies, int k_left, std::uint32_t s_e,
                                       int half) {
  constexpr int kCount = Traits::kCopies / kWidth;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int copy = half * kCount + i;
    const bool is_valid = e_copy_is_valid<Traits, kWidth>(copies, k_left, copy);
    device::copy_async<kWidth * 2>(s_e + e_copy_at<Traits, kWidth>(copies, copy),
                                   copies.e + copy * copies.e_step, is_valid ? kWidth * 2 : 0);
  }
}

// Half a block of each operand on its way through registers.
template <typename Traits>
struct MmaSingles {
  std::uint16_t w[Traits::kCopies];
  std::uint16_t e[Traits::kCopies];
};

// Starts the copies of half a block; single elements end in `singles`.
template <typename Traits>
__device__ __forceinline__ void begin_half(const StageArgs& args, const MmaCopies& copies,
                                           std::int64_t first_m, int first_k,
                                           typename Traits::Shared& shared, int stage, int half,
                                           MmaSingles<Traits>& singles) {
  const int k_left = args.k - first_k;
  if (args.w_width == 8) {
    copy_w<Traits, 8>(copies, k_left, device::smem_address(shared.w[stage]), half);
  } else if (!Traits::kSingles || args.w_width == 2) {
    copy_w<Traits, 2>(copies, k_left, device::smem_address(shared.w[stage]), half);
  } else if (!args.w_m_inner) {
#pragma unroll
    for (int i = 0; i < Traits::kCopies; ++i) {
      const int copy = half * Traits::kCopies + i;
      singles.w[i] = w_copy_is_valid<Traits, 1>(copies, k_left, copy)
                         ? copies.w[copy * copies.w_step]
                         : std::uint16_t{0};
    }
  } else {
    const Walk w = make_walk<Traits>(1, false);
    const auto* g_w = static_cast<const std::uint16_t*>(args.w);
#pragma unroll
    for (int i = 0; i < Traits::kCopies; ++i) {
      const std::int64_t row = first_m + w.x;
      const int k = w.k + (half * Traits::kCopies + i) * w.dk;
      singles.w[i] = row < args.m && k < k_left
                         ? g_w[row * args.stride_w_m + (first_k + k) * args.stride_w_k]
                         : std::uint16_t{0};
    }
  }
  if (args.e_width == 8) {
    copy_e<Traits, 8>(copies, k_left, device::smem_address(shared.e[stage]), half);
  } else if (!Traits::kSingles || args.e_width == 2) {
    copy_e<Traits, 2>(copies, k_left, device::smem_address(shared.e[stage]), half);
  } else if (!args.e_k_inner) {
#pragma unroll
    for (int i = 0; i < Traits::kCopies; ++i) {
      const int copy = half * Traits::kCopies + i;
      singles.e[i] = e_copy_is_valid<Traits, 1>(copies, k_left, copy)
                         ? copies.e[copy * copies.e_step]
                         : std::uint16_t{0};
    }
  } else {
    const Walk e = make_walk<Traits>(1, true);
    const auto* g_e = static_cast<const std::uint16_t*>(args.e);
#pragma unroll
    for (int i = 0; i < Traits::kCopies; ++i) {
      const Column& column = shared.columns[e.x + (half * Traits::kCopies + i) * e.dx];
      const int k = e.k + (half * Traits::kCopies + i) * e.dk;
      singles.e[i] = column.out >= 0 && k < k_left ? g_e[column.e + (first_k + k) * args.stride_e_k]
                                                   : std::uint16_t{0};
    }
  }
}

// Stores the single elements of half a block.
template <typename Traits>
__device__ __forceinline__ void end_half(const StageArgs& args, const MmaCopies& copies,
                                         typename Traits::Shared& shared, int stage, int half,
                                         const MmaSingles<Traits>& singles) {
  if (Traits::kSingles && args.w_width == 1) {
    const Walk w = make_walk<Traits>(1, false);
#pragma unroll
    for (int i = 0; i < Traits::kCopies; ++i) {
      const int copy = half * Traits::kCopies + i;
      const int at = args.w_m_inner ? Traits::w_at(w.x, w.k + copy * w.dk)
                                    : w_copy_at<Traits, 1>(copies, copy) / 2;
      shared.w[stage][at] = singles.w[i];
    }
  }
  if (Traits::kSingles && args.e_width == 1) {
    const Walk e = make_walk<Traits>(1, true);
#pragma unroll
    for (int i = 0; i < Traits::kCopies; ++i) {
      const int copy = half * Traits::kCopies + i;
      const int at = args.e_k_inner ? Traits::e_at(e.k, e.x + copy * e.dx)
                                    : e_copy_at<Traits, 1>(copies, copy) / 2;
      shared.e[stage][at] = singles.e[i];
    }
  }
}

// One step of 16 k on this warp's part of the tile. s_w and s_e: this lane's rows of the warp's
// first matrices, at k = 0 of the block.
template <typename Traits>
__device__ __forceinline__ void multiply_step(float (&acc)[Traits::kMmaM][Traits::kMmaN][4],
                                              std::uint32_t s_w, std::uint32_t s_e, int step) {
  std::uint32_t w[Traits::kMmaM][4];
#pragma unroll
  for (int i = 0; i < Traits::kMmaM; ++i) {
    device::load_matrices(w[i], (s_w ^ (step * 32)) + i * 16 * Traits::kBlockK * 2);
  }
#pragma unroll
  for (int j = 0; j < Traits::kMmaN; j += 2) {
    std::uint32_t e[4];
    device::load_matrices_transposed(e, (s_e ^ (j * 16)) + step * 16 * Traits::kTile * 2);
#pragma unroll
    for (int i = 0; i < Traits::kMmaM; ++i) {
      device::mma_m16n8k16<typename Traits::Element>(acc[i][j], w[i], e[0], e[1]);
      device::mma_m16n8k16<typename Traits::Element>(acc[i][j + 1], w[i], e[2], e[3]);
    }
  }
}

__device__ __forceinline__ void store_pair(float* out, float2 v) {
  *reinterpret_cast<float2*>(out) = v;
}
__device__ __forceinline__ void store_pair(__half* out, float2 v) {
  *reinterpret_cast<__half2*>(out) = __float22half2_rn(v);
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* out, float2 v) {
  *reinterpret_cast<__nv_bfloat162*>(out) = __float22bfloat162_rn(v);
}

// Rounds two neighbouring columns of one row and stores them; s_pair tells where.
template <typename Out>
__device__ __forceinline__ void store_columns(const StageArgs& args, const Column* s_pair,
                                              std::int64_t at, float2 v) {
  auto* out = static_cast<Out*>(args.out) + at;
  if (args.out_pairs) {
    if (s_pair[0].out >= 0) store_pair(out + s_pair[0].out, v);
    return;
  }
  if (s_pair[0].out >= 0) out[s_pair[0].out] = static_cast<Out>(v.x);
  if (s_pair[1].out >= 0) out[s_pair[1].out] = static_cast<Out>(v.y);
}

// Adds bias or user part to two neighbouring columns of one row and stores them.
template <typename Element>
__device__ __forceinline__ void write_columns(const StageArgs& args, const Column* s_pair,
                                              std::int64_t row, float2 v) {
  const std::int64_t at = row * args.n;
  if (args.add == nullptr) {
    const float bias = args.bias != nullptr
                           ? static_cast<float>(static_cast<const Element*>(args.bias)[row])
                           : 0.0f;
    store_columns<float>(args, s_pair, at, {v.x + bias, v.y + bias});
    return;
  }
  // The offsets of columns past the last are those of user 0's first, which is there to be read.
  const float* add = args.add + at;
  store_columns<Element>(args, s_pair, at, {v.x + add[s_pair[0].add], v.y + add[s_pair[1].add]});
}

// acc = w e of one tile.
template <typename Traits>
__device__ __forceinline__ void multiply_tile(float (&acc)[Traits::kMmaM][Traits::kMmaN][4],
                                              const StageArgs& args, std::int64_t first_m,
                                              typename Traits::Shared& shared, int warp_m,
                                              int warp_n) {
  const int num_blocks =
      static_cast<int>((std::int64_t{args.k} + Traits::kBlockK - 1) / Traits::kBlockK);
  MmaCopies copies = make_copies<Traits>(args, first_m, shared.columns);
  MmaSingles<Traits> singles;
#pragma unroll 1
  for (int block = 0; block < Traits::kStages - 1; ++block) {
    if (block < num_blocks) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        begin_half<Traits>(args, copies, first_m, block * Traits::kBlockK, shared, block, half,
                           singles);
        end_half<Traits>(args, copies, shared, block, half, singles);
      }
      copies.w += Traits::kBlockK * args.stride_w_k;
      copies.e += Traits::kBlockK * args.stride_e_k;
    }
    device::copy_async_commit();
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t s_w = device::smem_address(
      shared.w[0] + Traits::w_at(warp_m * Traits::kWarpM + lane % 16, lane / 16 * 8));
  const std::uint32_t s_e = device::smem_address(
      shared.e[0] + Traits::e_at(lane % 16, warp_n * Traits::kWarpN + lane / 16 * 8));
  constexpr int kStageBytes = Traits::kTile * Traits::kBlockK * 2;
  int stage = 0;
  int next_stage = Traits::kStages - 1;
  for (int block = 0; block < num_blocks; ++block) {
    device::copy_async_wait<Traits::kStages - 2>();
    __syncthreads();
    const int next = block + Traits::kStages - 1;
    const bool has_next = next < num_blocks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (has_next) {
        begin_half<Traits>(args, copies, first_m, next * Traits::kBlockK, shared, next_stage, half,
                           singles);
      }
      multiply_step<Traits>(acc, s_w + stage * kStageBytes, s_e + stage * kStageBytes, half);
      if (has_next) end_half<Traits>(args, copies, shared, next_stage, half, singles);
    }
    device::copy_async_commit();
    copies.w += Traits::kBlockK * args.stride_w_k;
    copies.e += Traits::kBlockK * args.stride_e_k;
    stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
    next_stage = next_stage + 1 == Traits::kStages ? 0 : next_stage + 1;
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    lce_mma_kernel(const StageArgs args) {
  extern __shared__ __align__(128) unsigned char s_raw[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(s_raw);
  constexpr int kTile = Traits::kTile;
  const std::int64_t tiles_m = (std::int64_t{args.m} + kTile - 1) / kTile;
  const std::int64_t num_tiles = tiles_m * ((args.num_columns + kTile - 1) / kTile);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_m = thread / 32 % 2;
  const int warp_n = thread / 64;
  const int lane = thread % 32;

  for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    if (thread < kTile) {
      shared.columns[thread] = locate_column(args, tile / tiles_m * kTile + thread);
    }
    __syncthreads();  // `columns` are there
    const std::int64_t first_m = tile % tiles_m * kTile;
    float acc[Traits::kMmaM][Traits::kMmaN][4] = {};
    multiply_tile<Traits>(acc, args, first_m, shared, warp_m, warp_n);

    // Lane l holds columns l % 4 * 2 and the next, of rows l / 4 and l / 4 + 8.
#pragma unroll
    for (int j = 0; j < Traits::kMmaN; ++j) {
      const Column* pair = shared.columns + warp_n * Traits::kWarpN + j * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < Traits::kMmaM; ++i) {
        const std::int64_t row = first_m + warp_m * Traits::kWarpM + i * 16 + lane / 4;
        if (row < args.m)
          write_columns<typename Traits::Element>(args, pair, row, {acc[i][j][0], acc[i][j][1]});
        if (row + 8 < args.m)
          write_columns<typename Traits::Element>(args, pair, row + 8,
                                                  {acc[i][j][2], acc[i][j][3]});
      }
    }
    __syncthreads();  // the next tile overwrites `columns` and the stages
  }
}

}  // namespace ikbo::lce_impl
