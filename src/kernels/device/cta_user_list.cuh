// SPDX-License-Identifier: Apache-2.0
// The user of each of few candidates in shared memory, brought by the copy engine: they come from
// far, and to ask for them takes one instruction.
#pragma once

#include <cstdint>

#include "kernels/device/candidate_groups_layout.h"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/smem_address.cuh"

namespace ikbo::device {

template <int kNumThreads>
struct CtaUserList {
  static constexpr int kVector = 4;  // users that are read at a time
  struct Storage {
    alignas(16) std::int32_t users[kMaxCandsOfCta];
  };

  Storage& storage;
  std::uint64_t& loaded;  // barrier; its place serves no other purpose
  const std::int32_t* cand_to_user;
  int num_candidates;

  // By all threads, before all else; a barrier of the CTA follows. Of the copies, those of whole
  // vectors of an aligned list are asynchronous.
  __device__ __forceinline__ void begin() const {
    const int thread = static_cast<int>(threadIdx.x);
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(cand_to_user) % 16 == 0;
    const int copied = is_aligned ? num_candidates / kVector * kVector : 0;
    // Thread 0 may have barriers of its own to initialise.
    if (thread == kNumThreads - 32) {
      constexpr int kSize = static_cast<int>(sizeof(std::int32_t));
      mbarrier_init(barrier(), 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_bytes(barrier(), copied * kSize);
      if (copied > 0) {
        bulk_load(smem_address(storage.users), cand_to_user, copied * kSize, barrier());
      }
    }
    // The last vector is filled up with its last user.
#pragma unroll 1
    for (int b = copied + thread; b < num_vectors() * kVector; b += kNumThreads) {
      storage.users[b] = cand_to_user[min(b, num_candidates - 1)];
    }
  }

  // Until all are here, after the CTA's barrier.
  __device__ __forceinline__ void wait() const { mbarrier_wait(barrier(), 0); }

  __device__ __forceinline__ int num_vectors() const {
    return (num_candidates + kVector - 1) / kVector;
  }

  // Users of a vector of candidates, and of the candidate before it.
  struct Vector {
    int before;
    int4 users;
  };
  __device__ __forceinline__ Vector vector_at(int v) const {
    return {v > 0 ? storage.users[v * kVector - 1] : -1,
            reinterpret_cast<const int4*>(storage.users)[v]};
  }

 private:
  __device__ __forceinline__ std::uint32_t barrier() const { return smem_address(&loaded); }
};

}  // namespace ikbo::device
