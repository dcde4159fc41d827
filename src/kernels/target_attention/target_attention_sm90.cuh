// SPDX-License-Identifier: Apache-2.0
// Target attention on Hopper: persistent, warp-specialised, TMA and wgmma.
//
// A tile is 128 rows of one user and kv head: two consumer warpgroups, each with 64 rows, share a
// ring of blocks of K and one of V. Rows of any candidates of the user fill a tile.
//   loader of K, V  one thread; waits for an empty stage, then one TMA box per 64 columns. Rows
//                   past S are zeros; the last block's rows between the user's length and S are
//                   cleared by another warp, since a weight of 0 times NaN is NaN.
//   loader of Q     one warp, a tile ahead; by TMA boxes of rows that lie in one candidate, or by
//                   16-byte copies where candidates have few rows.
//   storer          one warp; likewise, what the consumers leave in the place of Q.
//   consumers       logits of the next block and values of the block before are multiplied
//                   together; the softmax of one consumer runs while the other multiplies. The two
//                   take turns in issuing, which keeps them half a block apart.
// With a history's own queries beside those of candidates (self_target_attention), tiles of them
// are further tiles over the same keys; the warp that clears rows of V fills in the results of
// queries at or past a user's length. Every row is computed by the same operations in the same
// order whatever else is in its tile or batch.
#pragma once

#include "kernels/target_attention/target_attention_sm90_absent.cuh"
#include "kernels/target_attention/target_attention_sm90_consumer.cuh"
#include "kernels/target_attention/target_attention_sm90_groups.cuh"
#include "kernels/target_attention/target_attention_sm90_history.cuh"
#include "kernels/target_attention/target_attention_sm90_outputs.cuh"
#include "kernels/target_attention/target_attention_sm90_queries.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNumThreads, 1)
    target_attention_sm90_kernel(const __grid_constant__ typename Traits::Params params) {
  extern __shared__ __align__(1024) unsigned char s_raw[];
  static_assert(Traits::kAlignment == 1024);
  if (device::smem_address(s_raw) % Traits::kAlignment != 0) asm volatile("trap;");
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(s_raw);
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kThreads, 0);
  const Sm90Cta<Traits> cta{.params = params,
                            .shared = shared,
                            .s_base = static_cast<std::uint32_t>(
                                computed_here(static_cast<int>(device::smem_address(s_raw))))};
  if (threadIdx.x == 0) {
    cta.init_barriers();
    device::prefetch_tensor_map(&params.k);
    device::prefetch_tensor_map(&params.v);
    device::prefetch_tensor_map(&params.q);
    device::prefetch_tensor_map(&params.out);
    if constexpr (Traits::kHasOwnRows) {
      device::prefetch_tensor_map(&params.q_user);
      device::prefetch_tensor_map(&params.out_user);
    }
  }
  if (params.args.groups_in_each_cta) Sm90Groups<Traits>::begin(params.args, shared);
  __syncthreads();
  device::grid_dependency_launch();
  if (params.args.groups_in_each_cta) {
    Sm90Groups<Traits>::group(params);
  } else {
    device::grid_dependency_wait();  // for the list of tiles
  }

  if (warpgroup == Traits::kConsumers) {
    device::registers_decrease<Traits::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Sm90History<Traits> history{cta};
    if (warp == 0 && lane == 0) history.load_keys_and_values();
    if (warp == 1) {
      history.clear_stray_rows(lane);
      if constexpr (Traits::kHasOwnRows) Sm90AbsentRows<Traits>{cta}.fill(lane);
    }
    if (warp == 2) Sm90Queries<Traits>{cta}.load_queries(lane);
    if (warp == 3) {
      publish_groups(cta, lane);
      Sm90Outputs<Traits>{cta}.store_outputs(lane);
    }
  } else {
    device::registers_increase<Traits::kConsumerRegisters>();
    const Sm90Consumers<Traits> consumers{cta};
    consumers.consume(warpgroup, static_cast<int>(threadIdx.x) % kThreads);
  }
}

}  // namespace ikbo::target_attention_impl
