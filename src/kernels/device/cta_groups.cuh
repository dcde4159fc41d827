// SPDX-License-Identifier: Apache-2.0
// Groups few candidates by user in shared memory, by all threads of a CTA. Every CTA that does
// comes to the same list: by user, those of a user in the order of the batch.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups_layout.h"
#include "kernels/device/cta_ranks.cuh"
#include "kernels/device/cta_user_list.cuh"

namespace ikbo::device {

template <int kNumThreads>
struct CtaGroups {
  using UserList = CtaUserList<kNumThreads>;
  using Ranks = CtaRanks<kNumThreads>;
  struct Scratch {
    typename UserList::Storage list;
    typename Ranks::Storage ranks;        // of candidates that are not sorted
    std::uint16_t begin[kMaxUsersOfCta];  // of a user's candidates, where they are sorted
    std::uint16_t end[kMaxUsersOfCta];    // begin + the user's count
  };

  Scratch& scratch;
  std::uint64_t& loaded;  // barrier beside the scratch
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;

  // Before all else; a barrier of the CTA follows.
  __device__ __forceinline__ void begin() const {
    user_list().begin();
#pragma unroll 1
    for (int u = thread(); u < num_users; u += kNumThreads) scratch.begin[u] = scratch.end[u] = 0;
  }

  // Counts the candidates of each user and raises `longest` to the largest of their `lengths`,
  // where there are any. Whether they are sorted by user: then they are listed in `cands`, too.
  __device__ __forceinline__ bool count(const std::int32_t* lengths, int* longest,
                                        std::uint16_t* cands) const {
    user_list().wait();
    const bool is_sorted = __syncthreads_and(list_as_they_are(cands) ? 1 : 0) != 0;
    if (lengths != nullptr) {
#pragma unroll 1
      for (int b = thread(); b < num_candidates; b += kNumThreads) {
        atomicMax(&longest[user_of(b)], lengths[b]);
      }
    }
    if (is_sorted) {
      count_sorted();
    } else {
      ranks().count();
      __syncthreads();
#pragma unroll 1
      for (int u = thread(); u < num_users; u += kNumThreads) {
        scratch.begin[u] = 0;
        scratch.end[u] = static_cast<std::uint16_t>(ranks().sum_up(u));
      }
    }
    __syncthreads();
    return is_sorted;
  }

  __device__ __forceinline__ int count_of(int user) const {
    return scratch.end[user] - scratch.begin[user];
  }

  // Lists candidates that are not sorted.
  __device__ __forceinline__ void list(const std::uint16_t* first_cands,
                                       std::uint16_t* cands) const {
    ranks().list(first_cands, cands);
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ UserList user_list() const {
    return {scratch.list, loaded, cand_to_user, num_candidates};
  }
  __device__ __forceinline__ Ranks ranks() const {
    return {scratch.ranks, scratch.list.users, num_users, num_candidates};
  }
  __device__ __forceinline__ int user_of(int b) const { return scratch.list.users[b]; }

  // Whether this thread's candidates are sorted.
  __device__ __forceinline__ bool list_as_they_are(std::uint16_t* cands) const {
    const UserList list = user_list();
    bool is_sorted = true;
#pragma unroll 1
    for (int v = thread(); v < list.num_vectors(); v += kNumThreads) {
      const auto [before, u] = list.vector_at(v);
      is_sorted = is_sorted && before <= u.x && u.x <= u.y && u.y <= u.z && u.z <= u.w;
      const auto b = static_cast<unsigned>(v * UserList::kVector);
      reinterpret_cast<uint2*>(cands)[v] = {b | (b + 1) << 16, b + 2 | (b + 3) << 16};
    }
    return is_sorted;
  }

  // A user's candidates begin where its number first appears.
  __device__ __forceinline__ void count_sorted() const {
    const UserList list = user_list();
#pragma unroll 1
    for (int v = thread(); v < list.num_vectors(); v += kNumThreads) {
      const auto [before, u] = list.vector_at(v);
      const int b = v * UserList::kVector;
      note_border(before, u.x, b);
      note_border(u.x, u.y, b + 1);
      note_border(u.y, u.z, b + 2);
      note_border(u.z, u.w, b + 3);
    }
    if (thread() == 0 && num_candidates > 0) {
      scratch.end[user_of(num_candidates - 1)] = static_cast<std::uint16_t>(num_candidates);
    }
  }
  __device__ __forceinline__ void note_border(int user_before, int user, int b) const {
    if (user_before == user) return;
    scratch.begin[user] = static_cast<std::uint16_t>(b);
    if (user_before >= 0) scratch.end[user_before] = static_cast<std::uint16_t>(b);
  }
};

}  // namespace ikbo::device
