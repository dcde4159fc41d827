// SPDX-License-Identifier: Apache-2.0
// The kernel of linear_sm90: roles, tiles, and which epilogue when.
#pragma once

#include "kernels/linear/linear_sm90_epilogue.cuh"

namespace ikbo::linear_impl {

template <typename Traits>
struct Consumer {
  static constexpr int kTileM = Traits::kTileM;

  const Sm90Args& args;
  Mainloop<Traits>& mainloop;
  int consumer;
  int thread;

  __device__ __forceinline__ int first_row(int tile) const {
    return tile / args.num_tiles_m * Traits::kTileRows;
  }

  __device__ __forceinline__ int first_m(int tile) const {
    return tile % args.num_tiles_m * kTileM;
  }

  __device__ __forceinline__ void run(int first_tile, int tile_stride) const {
    const Epilogue<Traits> epilogue{args};
    const bool is_user = args.cand_to_user == nullptr;
    const int column = thread % 4 * 8;
    const int i = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;  // row of the tile; i + 8 too
    float acc[kTileM / 2];
    for (int tile = first_tile; tile < args.num_tiles; tile += tile_stride) {
      const bool is_first = tile == first_tile;
      const int next_tile = tile + tile_stride;
      const int row[2] = {first_row(tile) + i, first_row(tile) + i + 8};
      const int m = first_m(tile) + column;
      int user[2] = {};
      int next_user[2] = {};
      const bool has_next = !is_user && next_tile < args.num_tiles;
      if (!is_user && is_first) {
        user[0] = epilogue.user_of(row[0]);
        user[1] = epilogue.user_of(row[1]);
      }
      if (has_next) {
        next_user[0] = epilogue.user_of(first_row(next_tile) + i);
        next_user[1] = epilogue.user_of(first_row(next_tile) + i + 8);
      }
      mainloop.consume_tile(acc, consumer, thread % 32, !is_user && !is_first);
      if constexpr (Traits::kConsumers == 1) {
        if (args.split_k > 1) {  // such a CTA has one tile
          epilogue.reduce_and_finish(acc, mainloop.shared.stages, first_row(tile), first_m(tile));
          return;
        }
      }
      if (is_user) {
        epilogue.store_all_partials(acc, row, m);
        continue;
      }
      if (is_first) {
        device::grid_dependency_wait();
        epilogue.add_partials(acc,
                              {epilogue.partial_of(user[0], m), epilogue.partial_of(user[1], m)});
      }
      device::activate_fast(args.activation, acc);
      const int next_m = first_m(next_tile) + column;
      const float* const g_next[2] = {
          has_next ? epilogue.partial_of(next_user[0], next_m) : nullptr,
          has_next ? epilogue.partial_of(next_user[1], next_m) : nullptr};
      const auto out = epilogue.make_out_rows(row[0], m);
      if (epilogue.has_aligned_out()) {
        epilogue.template store_tile<true>(acc, out, g_next, first_m(tile), m);
      } else {
        epilogue.template store_tile<false>(acc, out, g_next, first_m(tile), m);
      }
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNumThreads, Traits::kCtasPerSm)
    linear_sm90_kernel(const __grid_constant__ Sm90Args args,
                       const __grid_constant__ CUtensorMap map_x,
                       const __grid_constant__ CUtensorMap map_w,
                       const __grid_constant__ CUtensorMap map_w_full) {
  extern __shared__ unsigned char s_raw[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(
      s_raw + ((1024 - device::smem_address(s_raw) % 1024) % 1024));
  constexpr int kConsumers = Traits::kConsumers;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kThreads, 0);
  const int rank = args.split_k > 1 ? device::cluster_rank() : 0;
  Mainloop<Traits> mainloop{.args = args,
                            .shared = shared,
                            .first_block = rank * args.num_blocks_k / args.split_k,
                            .end_block = (rank + 1) * args.num_blocks_k / args.split_k};
  const int first_tile = static_cast<int>(blockIdx.x) / args.split_k;
  const int tile_stride = static_cast<int>(gridDim.x) / args.split_k;
  if (args.cand_to_user == nullptr) {
    // The candidate grid may start once the copied weights are there.
    device::grid_dependency_wait();
    device::grid_dependency_launch();
  }
  if (threadIdx.x == 0) {
    mainloop.init_barriers();
    device::prefetch_tensor_map(&map_x);
    device::prefetch_tensor_map(&map_w);
  }
  __syncthreads();

  if (warpgroup == kConsumers) {
    if constexpr (kConsumers > 1) device::registers_decrease<40>();
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    if (thread == 0 || mainloop.has_copies()) {
      for (int tile = first_tile; tile < args.num_tiles; tile += tile_stride) {
        mainloop.produce_tile({&map_x, &map_w, &map_w_full},
                              tile / args.num_tiles_m * Traits::kTileRows,
                              tile % args.num_tiles_m * Traits::kTileM, thread);
      }
    }
  } else {
    if constexpr (kConsumers > 1) device::registers_increase<232>();
    Consumer<Traits>{args, mainloop, warpgroup, static_cast<int>(threadIdx.x) % kThreads}.run(
        first_tile, tile_stride);
  }
}

}  // namespace ikbo::linear_impl
