// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user in the shared memory of each CTA: a few microseconds less than a
// kernel ahead that all CTAs wait for. Every CTA comes to the same list.
#pragma once

#include "kernels/device/cta_groups.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Groups : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Cta::params;
  using Cta::shared;
  static constexpr int kNumThreads = Traits::kNumThreads;
  using Groups = device::CtaGroups<kNumThreads>;
  using Scratch = typename Groups::Scratch;  // until K and V come, their place is free
  static_assert(sizeof(Scratch) <=
                sizeof(Traits::SharedStorage::k) + sizeof(Traits::SharedStorage::v));

  // By all threads of the CTA.
  // NOTE: inlined, its branches would make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp.
  __device__ __noinline__ void group() const {
    const Sm90Args& a = params.args;
    auto& lists = shared.groups;
    const Groups groups{.scratch = reinterpret_cast<Scratch&>(shared.k),
                        .cand_to_user = a.cand_to_user,
                        .num_users = a.num_users,
                        .num_candidates = a.num_candidates};
    for (int u = thread(); u < a.num_users; u += kNumThreads) {
      lists.num_keys[u] = a.histories.cand_lengths != nullptr ? 0 : a.histories.num_keys;
    }
    const bool is_sorted = groups.count(a.histories.cand_lengths, lists.num_keys);
    for (int u = thread(); u < a.num_users; u += kNumThreads) {
      lists.num_keys[u] = min(lists.num_keys[u], a.histories.length_of(u));
    }
    __syncthreads();
    order_users();
    __syncthreads();
    if (thread() < 32) {
      device::place_tiles(
          groups.scratch.counts, a.num_users, [&](int i) { return lists.users[i]; },
          [&](int candidates) { return tiles_of(candidates); }, lists.first_cands,
          lists.first_tiles, lists.num_tiles);
    }
    __syncthreads();
    groups.list(is_sorted, lists.first_cands, lists.cands);
    device::fence_smem_to_async();
    __syncthreads();
    if (a.num_splits > 1 && blockIdx.x == 0) publish();
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  // Users with more keys first; among equals the order of the users.
  __device__ __forceinline__ void order_users() const {
    const Sm90Args& a = params.args;
    const int* num_keys = shared.groups.num_keys;
    for (int u = thread(); u < a.num_users; u += kNumThreads) {
      int rank = u;
      if (a.histories.are_uneven()) {
        const int keys = num_keys[u];
        rank = 0;
#pragma unroll 4
        for (int v = 0; v < a.num_users; ++v) {
          rank += num_keys[v] > keys || (num_keys[v] == keys && v < u) ? 1 : 0;
        }
      }
      shared.groups.users[rank] = static_cast<std::uint16_t>(u);
    }
  }

  __device__ __forceinline__ int tiles_of(int candidates) const {
    return (candidates * params.args.rows_of_candidate + Traits::kTileRows - 1) / Traits::kTileRows;
  }

  // For the kernel that merges.
  __device__ __forceinline__ void publish() const {
    const Sm90Args& a = params.args;
    const int num_tiles = shared.groups.num_tiles;
    if (thread() == 0) *a.num_tiles = num_tiles;
    for (int t = thread(); t < num_tiles; t += kNumThreads) {
      a.tiles[t * a.num_splits] = this->tile_of_cta(t, 0);
    }
    for (int i = thread(); i < a.num_candidates; i += kNumThreads) {
      a.grouped_cands[i] = shared.groups.cands[i];
    }
  }
};

}  // namespace ikbo::target_attention_impl
