// SPDX-License-Identifier: Apache-2.0
// The places of candidates that are not sorted in the list by user, by all threads of a CTA: of one
// user they keep the order of the batch.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups_layout.h"
#include "kernels/device/user_peers.cuh"

namespace ikbo::device {

template <int kNumThreads>
struct CtaRanks {
  static constexpr int kWarps = kNumThreads / 32;
  struct Storage {
    std::uint16_t ranks[kMaxCandsOfCta];  // among those of its user in the warp's share
    std::uint16_t counts_of_warps[kWarps][kMaxUsersOfCta];  // candidates in the warp's share
  };

  Storage& storage;
  const std::int32_t* users;  // of the candidates
  int num_users;
  int num_candidates;

  // Counts the users in the warp's share, and each candidate's rank among those of its user there.
  __device__ __forceinline__ void count() const {
    std::uint16_t* counts = storage.counts_of_warps[thread() / 32];
#pragma unroll 1
    for (int u = thread() % 32; u < num_users; u += 32) counts[u] = 0;
    __syncwarp();
    const int end = end_of_share();
#pragma unroll 1
    for (int b = begin_of_share(); b - thread() % 32 < end; b += 32) {
      const int user = b < end ? users[b] : -1;
      const Peers peers(user);
      const int before = user >= 0 ? counts[user] : 0;
      __syncwarp();
      if (user >= 0) {
        storage.ranks[b] = static_cast<std::uint16_t>(before + peers.before());
        if (peers.is_first()) counts[user] = static_cast<std::uint16_t>(before + peers.count());
      }
      __syncwarp();
    }
  }

  // A user's candidates, how many there are; those of a warp's share are placed after those of the
  // warps before it.
  __device__ __forceinline__ int sum_up(int user) const {
    int before = 0;
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      const int count = storage.counts_of_warps[w][user];
      storage.counts_of_warps[w][user] = static_cast<std::uint16_t>(before);
      before += count;
    }
    return before;
  }

  // When all users' candidates are summed up.
  __device__ __forceinline__ void list(const std::uint16_t* first_cands,
                                       std::uint16_t* cands) const {
    const std::uint16_t* before = storage.counts_of_warps[thread() / 32];
#pragma unroll 2
    for (int b = begin_of_share(); b < end_of_share(); b += 32) {
      const int user = users[b];
      cands[first_cands[user] + before[user] + storage.ranks[b]] = static_cast<std::uint16_t>(b);
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

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
};

}  // namespace ikbo::device
