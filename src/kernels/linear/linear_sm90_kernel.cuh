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
    // Not the user stage, nor a share of a sum, which the cluster adds up first.
    const bool adds_partial = args.cand_to_user != nullptr && args.split_k == 1;
    const int column = thread % 4 * 8;
    const int i = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;  // row of the tile; i + 8 too
    float acc[kTileM / 2];
    typename Epilogue<Traits>::Ahead ahead;
    for (int tile = first_tile; tile < args.num_tiles; tile += tile_stride) {
      const int row[2] = {first_row(tile) + i, first_row(tile) + i + 8};
      const int m = first_m(tile) + column;
      const float* g_partial[2] = {};
      if (adds_partial) {
        g_partial[0] = epilogue.partial_of(epilogue.user_of(row[0]), m);
        g_partial[1] = epilogue.partial_of(epilogue.user_of(row[1]), m);
      }
      mainloop.consume_tile(acc, consumer, thread % 32, [&] {
        if (!adds_partial) return;
        if (tile == first_tile) device::grid_dependency_wait();
        epilogue.fetch_partials(ahead, g_partial);
      });
      if constexpr (Traits::kConsumers == 1) {
        if (args.split_k > 1) {  // such a CTA has one tile
          epilogue.reduce_and_finish(acc, mainloop.shared.stages, first_row(tile), first_m(tile));
          return;
        }
      }
      if (!adds_partial) {
        epilogue.store_all_partials(acc, row, m);
        continue;
      }
      epilogue.add_partials(acc, ahead, g_partial);
      device::activate_fast(args.activation, acc);
      const auto out = epilogue.make_out_rows(row[0], m);
      if (epilogue.has_aligned_out()) {
        epilogue.template store_tile<true>(acc, out, first_m(tile), m);
      } else {
        epilogue.template store_tile<false>(acc, out, first_m(tile), m);
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
