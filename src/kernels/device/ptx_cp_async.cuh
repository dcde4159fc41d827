// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory by the threads themselves, sm_80 and newer.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

namespace ikbo::device {

// Copies the first `valid_bytes` of kBytes (4 or 16, both sides aligned to it) and zeros the rest.
template <int kBytes>
__device__ __forceinline__ void copy_async(std::uint32_t s_destination, const void* g_source,
                                           int valid_bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s_destination),
                 "l"(g_source), "r"(valid_bytes)
                 : "memory");
  } else {
    static_assert(kBytes == 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s_destination), "l"(g_source),
                 "r"(valid_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives on `barrier` once the copies that this thread started before are complete.
__device__ __forceinline__ void copy_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace ikbo::device
