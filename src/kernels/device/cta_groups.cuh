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
    std::uint16_t users[kMaxCandsOfCta];                    // of the candidates
    std::uint16_t counts_of_warps[kWarps][kMaxUsersOfCta];  // candidates in the warp's share
    std::uint16_t counts[kMaxUsersOfCta];
    std::uint16_t begin[kMaxUsersOfCta];
    std::uint16_t end[kMaxUsersOfCta];
  };

  Scratch& scratch;
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;

  // Counts the candidates of each user u; thread u % kNumThreads knows the count at once, others
  // after a barrier. Raises `longest` of each user to the `lengths` of its candidates, where there
  // are any. Whether the candidates are sorted by user.
  __device__ __forceinline__ bool count(const std::int32_t* lengths, int* longest) const {
    for (int u = thread(); u < num_users; u += kNumThreads) {
      scratch.begin[u] = scratch.end[u] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) scratch.counts_of_warps[w][u] = 0;
    }
    __syncthreads();
    load_users(lengths, longest);
    __syncthreads();
    const bool is_sorted = __syncthreads_and(has_sorted_share() ? 1 : 0) != 0;
    if (is_sorted) {
      count_sorted();
    } else {
      visit_share([](int, int, const Peers&, const std::uint16_t*) {});
    }
    __syncthreads();
    for (int u = thread(); u < num_users; u += kNumThreads) sum_up(u);
    return is_sorted;
  }

  __device__ __forceinline__ void list(bool is_sorted, const std::uint16_t* first_cands,
                                       std::uint16_t* cands) const {
    if (is_sorted) {
      for (int b = thread(); b < num_candidates; b += kNumThreads) {
        cands[b] = static_cast<std::uint16_t>(b);
      }
      return;
    }
    visit_share([&](int b, int user, const Peers& peers, const std::uint16_t* counts) {
      if (user >= 0) {
        cands[first_cands[user] + counts[user] + peers.before()] = static_cast<std::uint16_t>(b);
      }
      __syncwarp();
    });
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  // Many at once: they come from far.
  __device__ __forceinline__ void load_users(const std::int32_t* lengths, int* longest) const {
    constexpr int kAtOnce = 8;
    for (int first = thread(); first < num_candidates; first += kAtOnce * kNumThreads) {
      int user[kAtOnce];
      int length[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = first + i * kNumThreads;
        const bool has_cand = b < num_candidates;
        user[i] = has_cand ? cand_to_user[b] : -1;
        length[i] = has_cand && lengths != nullptr ? lengths[b] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (user[i] < 0) continue;
        scratch.users[first + i * kNumThreads] = static_cast<std::uint16_t>(user[i]);
        if (length[i] > 0) atomicMax(&longest[user[i]], length[i]);
      }
    }
  }

  __device__ __forceinline__ bool has_sorted_share() const {
    bool is_sorted = true;
    for (int b = thread() + 1; b < num_candidates; b += kNumThreads) {
      is_sorted = is_sorted && scratch.users[b - 1] <= scratch.users[b];
    }
    return is_sorted;
  }

  __device__ __forceinline__ void count_sorted() const {
    const int last = num_candidates - 1;
    for (int b = thread(); b <= last; b += kNumThreads) {
      const int user = scratch.users[b];
      if (b == 0 || scratch.users[b - 1] != user) {
        scratch.begin[user] = static_cast<std::uint16_t>(b);
      }
      if (b == last || scratch.users[b + 1] != user) {
        scratch.end[user] = static_cast<std::uint16_t>(b + 1);
      }
    }
  }

  // Calls `visit(b, user, peers, counts)` for the warp's share of neighbouring candidates, in order
  // and by all lanes, then adds them to the warp's counts; a user of -1 where there is none.
  template <typename Visit>
  __device__ __forceinline__ void visit_share(Visit&& visit) const {
    std::uint16_t* counts = scratch.counts_of_warps[thread() / 32];
    const int share = (num_candidates + kNumThreads - 1) / kNumThreads * 32;
    const int first = thread() / 32 * share;
    for (int at = 0; at < share && first + at < num_candidates; at += 32) {
      const int b = first + at + thread() % 32;
      const int user = b < num_candidates ? scratch.users[b] : -1;
      const Peers peers(user);
      visit(b, user, peers, counts);
      if (user >= 0 && peers.is_first()) {
        counts[user] = static_cast<std::uint16_t>(counts[user] + peers.count());
      }
      __syncwarp();
    }
  }

  // A user's candidates; those of a warp's share are placed after those of the warps before it.
  __device__ __forceinline__ void sum_up(int user) const {
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
  }
};

}  // namespace ikbo::device
