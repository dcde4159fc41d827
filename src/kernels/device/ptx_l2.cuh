// SPDX-License-Identifier: Apache-2.0
// Prefetches into the L2 cache.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
#pragma once

namespace ikbo::device {

// Asks for the line that holds this address.
__device__ __forceinline__ void prefetch_l2(const void* g_address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(g_address));
}

}  // namespace ikbo::device
