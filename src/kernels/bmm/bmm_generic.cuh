// SPDX-License-Identifier: Apache-2.0
// The user's matrix times the candidates' on any architecture since sm_80: tiles of 64 rows of P by
// 64 columns of one user's candidates, which share the user's rows. Elements are copied one by one,
// so that strides, sizes and alignment do not matter; a thread loads block i + 1 of R into
// registers while it works on block i.
// An engine says how the product of a block is computed: MmaEngine by tensor cores (16-bit types,
// fp32 sums), SimtEngine by plain multiply-adds (fp32).
#pragma once

#include <cstdint>

#include "kernels/bmm/bmm_layout.h"
#include "kernels/device/fast_divide.cuh"
#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/smem_address.cuh"

namespace ikbo::bmm_impl {

inline constexpr int kGenericThreads = 256;
inline constexpr int kGenericTile = 64;  // rows of P
static_assert(kGenericTile == kTileColumns);

struct GenericArgs {
  const std::int32_t* num_tiles;
  const Tile* tiles;
  const std::int32_t* grouped_cands;
  const void* a_user;
  const void* b_cand;
  void* out;
  std::int64_t stride_a_u;
  std::int64_t stride_a_p;
  std::int64_t stride_a_r;
  std::int64_t stride_b_b;
  std::int64_t stride_b_r;
  std::int64_t stride_b_n;
  int p;
  int r;
  int n;
  int num_tiles_p;
  device::FastDivide divide_by_n;
};

// Where a column of the tile starts in b_cand and in out; elements. No column: out < 0.
struct GenericColumn {
  std::int64_t b;
  std::int64_t out;
};

__device__ __forceinline__ GenericColumn locate_column(const GenericArgs& args, const Tile& tile,
                                                       int column) {
  if (column >= tile.num_columns) return {0, -1};
  const int of_user = tile.first_column + column;
  const int position = args.divide_by_n(of_user);
  const int n = of_user - position * args.n;
  const std::int64_t cand = args.grouped_cands[tile.first_cand + position];
  return {cand * args.stride_b_b + n * args.stride_b_n, cand * args.p * args.n + n};
}

template <typename ElementT>
struct MmaEngine {
  using Element = ElementT;
  using Word = std::uint16_t;
  static constexpr int kBlockR = 32;
  static constexpr int kWarpP = 32;
  static constexpr int kWarpColumns = 16;

  struct Shared {
    alignas(128) Word a[2][kGenericTile * kBlockR];
    alignas(128) Word b[2][kBlockR * kTileColumns];
  };
  struct Sums {
    float v[kWarpP / 16][kWarpColumns / 8][4] = {};
  };

  // Both tiles are swizzled by 16-byte chunks, so that eight rows of a matrix load hit all banks.
  static __device__ __forceinline__ int a_at(int row, int r) {
    return row * kBlockR + ((r / 8) ^ (row / 2 % 4)) * 8 + r % 8;
  }
  static __device__ __forceinline__ int b_at(int r, int column) {
    return r * kTileColumns + ((column / 8) ^ (r % 8)) * 8 + column % 8;
  }

  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x) / 32 % 2 * kWarpP;
  }
  static __device__ __forceinline__ int warp_column() {
    return static_cast<int>(threadIdx.x) / 64 * kWarpColumns;
  }

  static __device__ __forceinline__ void multiply(Sums& sums, const Shared& shared, int buffer) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int r = 0; r < kBlockR; r += 16) {
      std::uint32_t b[4];
      const int at = b_at(r + lane % 16, warp_column() + lane / 16 * 8);
      device::load_matrices_transposed(b, device::smem_address(shared.b[buffer] + at));
#pragma unroll
      for (int i = 0; i < kWarpP / 16; ++i) {
        std::uint32_t a[4];
        const int row = warp_row() + i * 16 + lane % 16;
        device::load_matrices(
            a, device::smem_address(shared.a[buffer] + a_at(row, r + lane / 16 * 8)));
        device::mma_m16n8k16<Element>(sums.v[i][0], a, b[0], b[1]);
        device::mma_m16n8k16<Element>(sums.v[i][1], a, b[2], b[3]);
      }
    }
  }

  // Calls `place(row, column, sum)` for each output of this thread.
  template <typename Place>
  static __device__ __forceinline__ void visit(const Sums& sums, Place&& place) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kWarpP / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          place(warp_row() + i * 16 + lane / 4 + k / 2 * 8,
                warp_column() + j * 8 + lane % 4 * 2 + k % 2, sums.v[i][j][k]);
        }
      }
    }
  }
};

struct SimtEngine {
  using Element = float;
  using Word = float;
  static constexpr int kBlockR = 16;
  static constexpr int kOutputs = 4;  // along P and along the columns
  static constexpr int kPitch = 68;   // of rows of 64, which float4 reads

  struct Shared {
    alignas(16) Word a[2][kBlockR * kPitch];
    alignas(16) Word b[2][kBlockR * kPitch];
  };
  struct Sums {
    float v[kOutputs][kOutputs] = {};
  };

  static __device__ __forceinline__ int a_at(int row, int r) { return r * kPitch + row; }
  static __device__ __forceinline__ int b_at(int r, int column) { return r * kPitch + column; }

  static __device__ __forceinline__ int first_row() {
    return static_cast<int>(threadIdx.x) / 16 * kOutputs;
  }
  static __device__ __forceinline__ int first_column() {
    return static_cast<int>(threadIdx.x) % 16 * kOutputs;
  }

  static __device__ __forceinline__ void multiply(Sums& sums, const Shared& shared, int buffer) {
#pragma unroll
    for (int r = 0; r < kBlockR; ++r) {
      float a[kOutputs];
      float b[kOutputs];
      *reinterpret_cast<float4*>(a) =
          *reinterpret_cast<const float4*>(shared.a[buffer] + a_at(first_row(), r));
      *reinterpret_cast<float4*>(b) =
          *reinterpret_cast<const float4*>(shared.b[buffer] + b_at(r, first_column()));
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) sums.v[i][j] = fmaf(a[i], b[j], sums.v[i][j]);
      }
    }
  }

  template <typename Place>
  static __device__ __forceinline__ void visit(const Sums& sums, Place&& place) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) place(first_row() + i, first_column() + j, sums.v[i][j]);
    }
  }
};

// Where this thread's copies lie in a block of an operand: copy i at row of P (or column) x + i *
// kStepX and step r + i * kStepR. Lanes go along the operand's inner dimension.
template <int kBlockR, bool kAlongR>
struct Walk {
  static constexpr int kLanes = kAlongR ? kBlockR : kGenericTile;
  static constexpr int kStepX = kAlongR ? kGenericThreads / kBlockR : 0;
  static constexpr int kStepR = kAlongR ? 0 : kGenericThreads / kGenericTile;
  int x;
  int r;

  __device__ __forceinline__ Walk() {
    const int thread = static_cast<int>(threadIdx.x);
    x = kAlongR ? thread / kLanes : thread % kLanes;
    r = kAlongR ? thread % kLanes : thread / kLanes;
  }
};

template <typename Engine, bool kAlongRA, bool kAlongRB>
struct GenericTileProduct {
  using Word = typename Engine::Word;
  using WalkA = Walk<Engine::kBlockR, kAlongRA>;
  using WalkB = Walk<Engine::kBlockR, kAlongRB>;
  static constexpr int kCopies = Engine::kBlockR * kGenericTile / kGenericThreads;

  struct Shared {
    typename Engine::Shared operands;
    GenericColumn columns[kTileColumns];
  };
  // One block of both operands in this thread's registers.
  struct Block {
    Word a[kCopies];
    Word b[kCopies];
  };

  const GenericArgs& args;
  Shared& shared;
  WalkA walk_a;
  WalkB walk_b;

  __device__ __forceinline__ void fetch(Block& block, const Word* g_a, int rows,
                                        int first_r) const {
    const int r_left = args.r - first_r;
    // NOTE: addresses are carried along from copy to copy: one each would fill the registers.
    g_a += walk_a.x * args.stride_a_p + (first_r + walk_a.r) * args.stride_a_r;
    const std::int64_t step_a = WalkA::kStepX * args.stride_a_p + WalkA::kStepR * args.stride_a_r;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool exists =
          walk_a.x + i * WalkA::kStepX < rows && walk_a.r + i * WalkA::kStepR < r_left;
      block.a[i] = exists ? *g_a : Word{0};
      g_a += step_a;
    }
    const Word* g_b =
        static_cast<const Word*>(args.b_cand) + (first_r + walk_b.r) * args.stride_b_r;
    const std::int64_t step_b = WalkB::kStepR * args.stride_b_r;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const GenericColumn& column = shared.columns[walk_b.x + i * WalkB::kStepX];
      const bool exists = column.out >= 0 && walk_b.r + i * WalkB::kStepR < r_left;
      block.b[i] = exists ? g_b[column.b] : Word{0};
      g_b += step_b;
    }
  }

  __device__ __forceinline__ void store(const Block& block, int buffer) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      shared.operands
          .a[buffer][Engine::a_at(walk_a.x + i * WalkA::kStepX, walk_a.r + i * WalkA::kStepR)] =
          block.a[i];
      shared.operands
          .b[buffer][Engine::b_at(walk_b.r + i * WalkB::kStepR, walk_b.x + i * WalkB::kStepX)] =
          block.b[i];
    }
  }

  // The tile's columns are in `shared`. Ends with every thread past its last read of the operands'
  // buffers.
  __device__ __forceinline__ void run(const Tile& tile, int first_p) const {
    const Word* g_a = static_cast<const Word*>(args.a_user) + tile.user * args.stride_a_u +
                      first_p * args.stride_a_p;
    const int rows = min(args.p - first_p, kGenericTile);
    const int num_blocks = (args.r + Engine::kBlockR - 1) / Engine::kBlockR;
    typename Engine::Sums sums;
    Block block;
    if (num_blocks > 0) {
      fetch(block, g_a, rows, 0);
      store(block, 0);
    }
#pragma unroll 1
    for (int i = 0; i < num_blocks; ++i) {
      __syncthreads();  // buffer i % 2 is full, and nobody reads the other
      const bool has_next = i + 1 < num_blocks;
      if (has_next) fetch(block, g_a, rows, (i + 1) * Engine::kBlockR);
      Engine::multiply(sums, shared.operands, i % 2);
      if (has_next) store(block, (i + 1) % 2);
    }
    auto* out = static_cast<typename Engine::Element*>(args.out);
    Engine::visit(sums, [&](int row, int column, float sum) {
      const std::int64_t at = shared.columns[column].out;
      if (at < 0 || row >= rows) return;
      out[at + std::int64_t{first_p + row} * args.n] = static_cast<typename Engine::Element>(sum);
    });
  }
};

template <typename Engine, bool kAlongRA, bool kAlongRB>
__global__ void __launch_bounds__(kGenericThreads, 2) bmm_generic_kernel(const GenericArgs args) {
  using Product = GenericTileProduct<Engine, kAlongRA, kAlongRB>;
  __shared__ typename Product::Shared shared;
  const Product product{.args = args, .shared = shared};
  const int num_tiles = *args.num_tiles;
  const std::int64_t num_items = std::int64_t{num_tiles} * args.num_tiles_p;
  for (std::int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int tile_p = static_cast<int>(item / num_tiles);
    const Tile tile = args.tiles[item - std::int64_t{tile_p} * num_tiles];
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kTileColumns) shared.columns[thread] = locate_column(args, tile, thread);
    __syncthreads();  // `columns` are there
    product.run(tile, tile_p * kGenericTile);
    __syncthreads();  // the next tile overwrites `columns` and the buffers
  }
}

}  // namespace ikbo::bmm_impl
