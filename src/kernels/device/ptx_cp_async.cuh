// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies of single words by the threads themselves.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

namespace ikbo::device {

// 4 bytes, of which the first `source_bytes` (0..4) are read and the others are zero.
__device__ __forceinline__ void cp_async_4(std::uint32_t s_destination, const void* g_source,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s_destination), "l"(g_source),
               "r"(source_bytes)
               : "memory");
}

// Arrives on `barrier` once the copies that this thread started before are complete.
__device__ __forceinline__ void cp_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace ikbo::device
