// SPDX-License-Identifier: Apache-2.0
// Groups few candidates by user in shared memory, by all threads of a CTA. Every CTA that does
// comes to the same list: by user, those of a user in the order of the batch.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups_layout.h"
#include "kernels/device/user_peers.cuh"

namespace ikbo::device {

template <int kNumThreads>
struct CtaGroups {
  static constexpr int kWarps = kNumThreads / 32;
  struct Scratch {
    std::uint16_t users[kMaxCandsOfCta];  // of the candidates
    std::uint16_t ranks[kMaxCandsOfCta];  // among those of its user in the warp's share
    std::uint16_t counts_of_warps[kWarps][kMaxUsersOfCta];  // candidates in the warp's share
    std::uint16_t begin[kMaxUsersOfCta];  // of a user's candidates, where they are sorted
    std::uint16_t end[kMaxUsersOfCta];    // begin + the user's count
  };

  Scratch& scratch;
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;

  // Before all else; a barrier of the CTA follows.
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int u = thread(); u < num_users; u += kNumThreads) scratch.begin[u] = scratch.end[u] = 0;
  }

  // Counts the candidates of each user and raises `longest` to the largest of their `lengths`,
  // where there are any. Whether they are sorted by user: then they are listed in `cands`, too.
  __device__ __forceinline__ bool count(const std::int32_t* lengths, int* longest,
                                        std::uint16_t* cands) const {
    const bool is_sorted = __syncthreads_and(load_users(lengths, longest, cands) ? 1 : 0) != 0;
    if (is_sorted) return true;
    rank_share();
    __syncthreads();
    for (int u = thread(); u < num_users; u += kNumThreads) sum_up(u);
    __syncthreads();
    return false;
  }

  __device__ __forceinline__ int count_of(int user) const {
    return scratch.end[user] - scratch.begin[user];
  }

  // Lists candidates that are not sorted.
  __device__ __forceinline__ void list(const std::uint16_t* first_cands,
                                       std::uint16_t* cands) const {
    const std::uint16_t* before = scratch.counts_of_warps[thread() / 32];
#pragma unroll 2
    for (int b = begin_of_share(); b < end_of_share(); b += 32) {
      const int user = scratch.users[b];
      cands[first_cands[user] + before[user] + scratch.ranks[b]] = static_cast<std::uint16_t>(b);
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  // Many at once: they come from far. Sorted users begin where they differ from the one before.
  __device__ __forceinline__ bool load_users(const std::int32_t* lengths, int* longest,
                                             std::uint16_t* cands) const {
    constexpr int kAtOnce = 6;
    bool is_sorted = true;
#pragma unroll 1
    for (int first = thread(); first < num_candidates; first += kAtOnce * kNumThreads) {
      int user[kAtOnce];
      int user_before[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = first + i * kNumThreads;
        user[i] = b < num_candidates ? cand_to_user[b] : 0;
        user_before[i] = b > 0 && b < num_candidates ? cand_to_user[b - 1] : -1;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = first + i * kNumThreads;
        if (b >= num_candidates) break;
        scratch.users[b] = static_cast<std::uint16_t>(user[i]);
        cands[b] = static_cast<std::uint16_t>(b);
        is_sorted = is_sorted && user_before[i] <= user[i];
        if (user_before[i] != user[i]) {
          scratch.begin[user[i]] = static_cast<std::uint16_t>(b);
          if (b > 0) scratch.end[user_before[i]] = static_cast<std::uint16_t>(b);
        }
        if (b == num_candidates - 1) scratch.end[user[i]] = static_cast<std::uint16_t>(b + 1);
      }
    }
    if (lengths != nullptr) {
#pragma unroll 1
      for (int b = thread(); b < num_candidates; b += kNumThreads) {
        atomicMax(&longest[cand_to_user[b]], lengths[b]);
      }
    }
    return is_sorted;
  }

  // A warp's share of neighbouring candidates; of them this lane's.
  __device__ __forceinline__ int share() const {
    return (num_candidates + kNumThreads - 1) / kNumThreads * 32;
  }
  __device__ __forceinline__ int begin_of_share() const {
    return thread() / 32 * share() + thread() % 32;
  }
  __device__ __forceinline__ int end_of_share() const {
    return min((thread() / 32 + 1) * share(), num_candidates);
  }

  // Counts the users in the warp's share, and each candidate's rank among those of its user there.
  __device__ __forceinline__ void rank_share() const {
    std::uint16_t* counts = scratch.counts_of_warps[thread() / 32];
#pragma unroll 1
    for (int u = thread() % 32; u < num_users; u += 32) counts[u] = 0;
    __syncwarp();
    const int end = end_of_share();
#pragma unroll 1
    for (int b = begin_of_share(); b - thread() % 32 < end; b += 32) {
      const int user = b < end ? scratch.users[b] : -1;
      const Peers peers(user);
      const int before = user >= 0 ? counts[user] : 0;
      __syncwarp();
      if (user >= 0) {
        scratch.ranks[b] = static_cast<std::uint16_t>(before + peers.before());
        if (peers.is_first()) counts[user] = static_cast<std::uint16_t>(before + peers.count());
      }
      __syncwarp();
    }
  }

  // A user's candidates; those of a warp's share are placed after those of the warps before it.
  __device__ __forceinline__ void sum_up(int user) const {
    int before = 0;
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      const int count = scratch.counts_of_warps[w][user];
      scratch.counts_of_warps[w][user] = static_cast<std::uint16_t>(before);
      before += count;
    }
    scratch.begin[user] = 0;
    scratch.end[user] = static_cast<std::uint16_t>(before);
  }
};

}  // namespace ikbo::device
