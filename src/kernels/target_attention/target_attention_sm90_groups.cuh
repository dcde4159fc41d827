// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user in the shared memory of each CTA: a few microseconds less than a
// kernel ahead that all CTAs wait for. Every CTA comes to the same list.
#pragma once

#include "kernels/device/cta_group_tiles.cuh"
#include "kernels/device/cta_groups.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"
#include "kernels/target_attention/target_attention_sm90_own_tiles.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Groups {
  static constexpr int kNumThreads = Traits::kNumThreads;
  using Groups = device::CtaGroups<kNumThreads>;
  using Scratch = typename Groups::Scratch;  // until K and V come, their place is free
  static_assert(sizeof(Scratch) <=
                sizeof(Traits::SharedStorage::k) + sizeof(Traits::SharedStorage::v));

  // By all threads of the CTA, before its first barrier: what does not depend on the candidates.
  __device__ __forceinline__ static void begin(const Sm90Args& a,
                                               typename Traits::SharedStorage& shared) {
    groups_of(shared, a.cand_to_user, a.num_users, a.num_candidates).begin();
    const Histories& h = a.histories;
#pragma unroll 1
    for (int u = thread(); u < a.num_users; u += kNumThreads) {
      shared.groups.num_keys[u] = h.cand_lengths != nullptr ? 0 : h.length_of(u);
      shared.groups.users[u] = static_cast<std::uint16_t>(u);
      if constexpr (Traits::kHasOwnRows) shared.groups.lengths[u] = h.length_of(u);
    }
  }

  // By all threads of the CTA, after its first barrier.
  __device__ __forceinline__ static void group(const typename Traits::Params& params) {
    const Sm90Args& a = params.args;
    const Histories& h = a.histories;
    if constexpr (Traits::kHasOwnRows) {
      list_candidates(a.cand_to_user, h.cand_lengths, h.user_lengths, h.user_offsets, a.num_users,
                      a.num_candidates, h.num_keys, a.rows_of_candidate, params.own.rows,
                      params.own.num_levels);
    } else {
      list_candidates(a.cand_to_user, h.cand_lengths, h.user_lengths, h.user_offsets, a.num_users,
                      a.num_candidates, h.num_keys, a.rows_of_candidate);
    }
  }

 private:
  __device__ __forceinline__ static Groups groups_of(typename Traits::SharedStorage& shared,
                                                     const std::int32_t* cand_to_user,
                                                     int num_users, int num_candidates) {
    return {.scratch = reinterpret_cast<Scratch&>(shared.k),
            .loaded = shared.groups.users_loaded,
            .cand_to_user = cand_to_user,
            .num_users = num_users,
            .num_candidates = num_candidates};
  }

  // NOTE: inlined, its branches would make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp. Arguments go by value: the kernel's own, read through
  // an address, come from far. Loops stay loops: each line of code comes from far, too, once.
  template <typename... Own>
  __device__ __noinline__ static void list_candidates(
      const std::int32_t* cand_to_user, const std::int32_t* cand_lengths,
      const std::int32_t* user_lengths, const std::int32_t* user_offsets, int num_users,
      int num_candidates, int num_keys, int rows_of_candidate, Own... own) {
    extern __shared__ __align__(1024) unsigned char s_raw[];
    auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(s_raw);
    auto& lists = shared.groups;
    const Groups groups = groups_of(shared, cand_to_user, num_users, num_candidates);
    const bool is_sorted = groups.count(cand_lengths, lists.num_keys, lists.cands);
    if (cand_lengths != nullptr) {
#pragma unroll 1
      for (int u = thread(); u < num_users; u += kNumThreads) {
        const int length = user_offsets != nullptr   ? user_offsets[u + 1] - user_offsets[u]
                           : user_lengths != nullptr ? user_lengths[u]
                                                     : num_keys;
        lists.num_keys[u] = min(lists.num_keys[u], length);
      }
      __syncthreads();
    }
    if (cand_lengths != nullptr || user_lengths != nullptr || user_offsets != nullptr) {
#pragma unroll 1
      for (int u = thread(); u < num_users; u += kNumThreads) {
        lists.users[rank_of(u, keys_of_users(lists), num_users)] = static_cast<std::uint16_t>(u);
      }
      __syncthreads();
    }
    if (thread() < 32) {
      device::place_tiles(
          num_users, [&](int u) { return groups.count_of(u); },
          [&](int i) { return lists.users[i]; },
          [&](int candidates) {
            return (candidates * rows_of_candidate + Traits::kTileRows - 1) / Traits::kTileRows;
          },
          lists.first_cands, lists.first_tiles, lists.num_tiles);
    }
    if (!is_sorted) {
      __syncthreads();
      groups.list(lists.first_cands, lists.cands);
    }
    device::fence_smem_to_async();
    __syncthreads();
    if constexpr (sizeof...(Own) > 0) place_own_tiles<kNumThreads>(lists, own..., num_users);
  }

  // By which users are ordered: their own rows count, too.
  __device__ __forceinline__ static const int* keys_of_users(const typename Traits::Groups& lists) {
    if constexpr (Traits::kHasOwnRows) {
      return lists.lengths;
    } else {
      return lists.num_keys;
    }
  }

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  // Place of a user when those with more keys come first; among equals in the order of the users.
  __device__ __forceinline__ static int rank_of(int user, const int* num_keys, int num_users) {
    const int keys = num_keys[user];
    int rank = 0;
#pragma unroll 4
    for (int v = 0; v < num_users; ++v) {
      rank += num_keys[v] > keys || (num_keys[v] == keys && v < user) ? 1 : 0;
    }
    return rank;
  }
};

// For the kernel that merges: what CTA 0 has listed. By one warp.
template <typename Traits>
__device__ __forceinline__ void publish_groups(const Sm90Cta<Traits>& cta, int lane) {
  const Sm90Args& a = cta.params.args;
  if (!a.groups_in_each_cta || a.num_splits == 1 || blockIdx.x > 0) return;
  const auto& lists = cta.shared.groups;
  if (lane == 0) *a.num_tiles = lists.num_tiles;
  for (int t = lane; t < lists.num_tiles; t += 32)
    a.tiles[t * a.num_splits] = cta.tile_of_cta(t, 0);
  for (int i = lane; i < a.num_candidates; i += 32) a.grouped_cands[i] = lists.cands[i];
}

}  // namespace ikbo::target_attention_impl
