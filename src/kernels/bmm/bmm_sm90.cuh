// SPDX-License-Identifier: Apache-2.0
// The user's matrix times the candidates' on Hopper: persistent, warp-specialised, wgmma.
//
// Transposed roles: D[column, p] = B^T A^T, so that the columns of any candidates of one user fill
// the 64 rows of the matrix instruction, and P, the wide side, lies on its columns.
// A tile is 64 columns of one user's candidates x kTileP rows of P, all of R. A CTA walks over
// neighbouring tiles: the user's matrix stays in shared memory as long as the user does.
//   producer   loads the matrix of the next user while the current one is used, and the columns of
//              candidates, 64 steps of R at a time, into a ring of stages: by the copy engine where
//              columns of a tile are whole boxes, else by 16-byte copies, so that candidates with
//              few columns share a tile.
//   consumers  two warpgroups take tiles in turn: one stores while the other multiplies. A result
//              is rounded, transposed through shared memory, and stored by the copy engine or in
//              16 bytes of a row.
// Where a user's matrix is streamed instead, both consumers take a tile each at a time and share
// its blocks of R, which are loaded anew for every such pair.
// A column is computed by the same operations in the same order whatever else is in its tile.
#pragma once

#include "kernels/bmm/bmm_sm90_consumer.cuh"
#include "kernels/bmm/bmm_sm90_groups.cuh"
#include "kernels/bmm/bmm_sm90_producer.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kNumThreads, 1)
    bmm_sm90_kernel(const __grid_constant__ Sm90Params params) {
  extern __shared__ __align__(1024) unsigned char s_raw[];
  static_assert(Traits::kAlignment == 1024);
  const std::uint32_t s_base = device::smem_address(s_raw);
  if (s_base % Traits::kAlignment != 0) asm volatile("trap;");
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kThreads, 0);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  Sm90Cta<Traits> cta{.params = params, .s_base = s_base, .list = {}};
  using Groups = Sm90Groups<Traits>;
  if (params.args.groups_in_each_cta) Groups::begin(cta, s_raw);
  if (threadIdx.x == 0) {
    cta.init_barriers();
    device::prefetch_tensor_map(&params.a);
    if (!cta.is_async()) device::prefetch_tensor_map(&params.b);
    if (params.args.store == BmmStore::kTma) device::prefetch_tensor_map(&params.out);
  }
  __syncthreads();
  if (params.args.groups_in_each_cta) {
    cta.list = Groups::list(cta, s_raw);
  } else {
    device::grid_dependency_wait();  // for the list
    const bool is_sorted = *params.args.is_sorted != 0;
    cta.list = {is_sorted ? nullptr : params.args.grouped_cands,
                is_sorted ? params.args.cand_to_user : nullptr, params.args.num_candidates};
  }

  if (warpgroup == kConsumers) {
    device::registers_decrease<Traits::kProducerRegisters>();
    const Sm90Producer<Traits> producer{cta};
    if (cta.is_async()) {
      producer.produce_copies(thread);
    } else if (thread < 32) {
      if (params.args.streams_user) {
        producer.produce_pairs(thread);
      } else {
        producer.produce_boxes(thread);
      }
    }
  } else {
    device::registers_increase<Traits::kConsumerRegisters>();
    const Sm90Consumer<Traits> consumer{cta};
    if (params.args.streams_user) {
      consumer.consume_pairs(warpgroup, thread);
    } else {
      consumer.consume(warpgroup, thread);
    }
  }
}

}  // namespace ikbo::bmm_impl
