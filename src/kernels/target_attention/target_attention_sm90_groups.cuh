// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user in the shared memory of each CTA: a few microseconds less than a
// kernel ahead that all CTAs wait for. Every CTA comes to the same list.
#pragma once

#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/user_peers.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90Groups : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Cta::params;
  using Cta::shared;
  static constexpr int kNumThreads = Traits::kNumThreads;
  static constexpr int kWarps = kNumThreads / 32;

  // Until K and V come, their place is free.
  struct Scratch {
    std::uint16_t users[kMaxCandsOfCta];                    // of the candidates
    std::uint16_t counts_of_warps[kWarps][kMaxUsersOfCta];  // candidates in the warp's share
    std::uint16_t counts[kMaxUsersOfCta];
    std::uint16_t begin[kMaxUsersOfCta];
    std::uint16_t end[kMaxUsersOfCta];
  };
  static_assert(sizeof(Scratch) <=
                sizeof(Traits::SharedStorage::k) + sizeof(Traits::SharedStorage::v));

  // By all threads of the CTA.
  // NOTE: inlined, its branches would make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp.
  __device__ __noinline__ void group() const {
    const Sm90Args& a = params.args;
    auto& scratch = reinterpret_cast<Scratch&>(shared.k);
    for (int u = thread(); u < a.num_users; u += kNumThreads) {
      scratch.begin[u] = scratch.end[u] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) scratch.counts_of_warps[w][u] = 0;
      shared.groups.num_keys[u] = a.histories.cand_lengths != nullptr ? 0 : a.histories.num_keys;
    }
    __syncthreads();
    load_users(scratch);
    __syncthreads();
    const bool is_sorted = __syncthreads_and(has_sorted_share(scratch) ? 1 : 0) != 0;
    if (is_sorted) {
      count_sorted(scratch);
    } else {
      count_shares(scratch);
    }
    __syncthreads();
    for (int u = thread(); u < a.num_users; u += kNumThreads) sum_up(scratch, u);
    __syncthreads();
    order_users();
    __syncthreads();
    if (thread() < 32) place_users(scratch, thread());
    __syncthreads();
    if (is_sorted) {
      for (int b = thread(); b < a.num_candidates; b += kNumThreads) {
        shared.groups.cands[b] = static_cast<std::uint16_t>(b);
      }
    } else {
      list_candidates(scratch);
    }
    device::fence_smem_to_async();
    __syncthreads();
    if (a.num_splits > 1 && blockIdx.x == 0) publish();
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  // Many at once: they come from far.
  __device__ __forceinline__ void load_users(Scratch& scratch) const {
    const Sm90Args& a = params.args;
    constexpr int kAtOnce = 8;
    for (int first = thread(); first < a.num_candidates; first += kAtOnce * kNumThreads) {
      int user[kAtOnce];
      int length[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = first + i * kNumThreads;
        const bool has_cand = b < a.num_candidates;
        user[i] = has_cand ? a.cand_to_user[b] : -1;
        length[i] =
            has_cand && a.histories.cand_lengths != nullptr ? a.histories.cand_lengths[b] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (user[i] < 0) continue;
        scratch.users[first + i * kNumThreads] = static_cast<std::uint16_t>(user[i]);
        if (length[i] > 0) atomicMax(&shared.groups.num_keys[user[i]], length[i]);
      }
    }
  }

  __device__ __forceinline__ bool has_sorted_share(const Scratch& scratch) const {
    bool is_sorted = true;
    for (int b = thread() + 1; b < params.args.num_candidates; b += kNumThreads) {
      is_sorted = is_sorted && scratch.users[b - 1] <= scratch.users[b];
    }
    return is_sorted;
  }

  __device__ __forceinline__ void count_sorted(Scratch& scratch) const {
    const int last = params.args.num_candidates - 1;
    for (int b = thread(); b <= last; b += kNumThreads) {
      const int user = scratch.users[b];
      if (b == 0 || scratch.users[b - 1] != user)
        scratch.begin[user] = static_cast<std::uint16_t>(b);
      if (b == last || scratch.users[b + 1] != user) {
        scratch.end[user] = static_cast<std::uint16_t>(b + 1);
      }
    }
  }

  // Calls `visit(b)` for the warp's share of neighbouring candidates, in order and by all lanes;
  // where there is none b is past the end.
  template <typename Visit>
  __device__ __forceinline__ void visit_share(Visit&& visit) const {
    const int num_cands = params.args.num_candidates;
    const int share = (num_cands + kNumThreads - 1) / kNumThreads * 32;
    const int first = thread() / 32 * share;
    for (int at = 0; at < share && first + at < num_cands; at += 32) {
      visit(first + at + thread() % 32);
    }
  }

  __device__ __forceinline__ void count_shares(Scratch& scratch) const {
    std::uint16_t* counts = scratch.counts_of_warps[thread() / 32];
    visit_share([&](int b) {
      const int user = b < params.args.num_candidates ? scratch.users[b] : -1;
      const device::Peers peers(user);
      if (user >= 0 && peers.is_first()) {
        counts[user] = static_cast<std::uint16_t>(counts[user] + peers.count());
      }
      __syncwarp();
    });
  }

  // A user's candidates; those of a warp's share are placed after those of the warps before it.
  __device__ __forceinline__ void sum_up(Scratch& scratch, int user) const {
    int count[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) count[w] = scratch.counts_of_warps[w][user];
    int before = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      scratch.counts_of_warps[w][user] = static_cast<std::uint16_t>(before);
      before += count[w];
    }
    scratch.counts[user] =
        static_cast<std::uint16_t>(before + scratch.end[user] - scratch.begin[user]);
    int& num_keys = shared.groups.num_keys[user];
    num_keys = min(num_keys, params.args.histories.length_of(user));
  }

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

  // Sums over users of candidates, and over users in their order of tiles; by one warp, a lane with
  // some neighbours each.
  __device__ __forceinline__ void place_users(const Scratch& scratch, int lane) const {
    const Sm90Args& a = params.args;
    auto& groups = shared.groups;
    const int users_of_lane = (a.num_users + 31) / 32;
    const int begin = min(lane * users_of_lane, a.num_users);
    const int end = min(begin + users_of_lane, a.num_users);
    int tiles = 0;
    int cands = 0;
    for (int i = begin; i < end; ++i) {
      cands += scratch.counts[i];
      tiles += tiles_of(scratch.counts[groups.users[i]]);
    }
    const int tiles_of_lanes = inclusive_sum(tiles, lane);
    int first_tile = tiles_of_lanes - tiles;
    int first_cand = inclusive_sum(cands, lane) - cands;
    for (int i = begin; i < end; ++i) {
      groups.first_tiles[i] = first_tile;
      groups.first_cands[i] = static_cast<std::uint16_t>(first_cand);
      first_tile += tiles_of(scratch.counts[groups.users[i]]);
      first_cand += scratch.counts[i];
    }
    if (lane == 31) {
      groups.num_tiles = tiles_of_lanes;
      groups.first_cands[a.num_users] = static_cast<std::uint16_t>(a.num_candidates);
    }
  }
  __device__ __forceinline__ static int inclusive_sum(int value, int lane) {
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value += other;
    }
    return value;
  }
  __device__ __forceinline__ int tiles_of(int candidates) const {
    return (candidates * params.args.rows_of_candidate + Traits::kTileRows - 1) / Traits::kTileRows;
  }

  __device__ __forceinline__ void list_candidates(Scratch& scratch) const {
    std::uint16_t* counts = scratch.counts_of_warps[thread() / 32];
    visit_share([&](int b) {
      const int user = b < params.args.num_candidates ? scratch.users[b] : -1;
      const device::Peers peers(user);
      if (user >= 0) {
        const int before = shared.groups.first_cands[user] + counts[user];
        shared.groups.cands[before + peers.before()] = static_cast<std::uint16_t>(b);
      }
      __syncwarp();
      if (user >= 0 && peers.is_first()) {
        counts[user] = static_cast<std::uint16_t>(counts[user] + peers.count());
      }
      __syncwarp();
    });
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
