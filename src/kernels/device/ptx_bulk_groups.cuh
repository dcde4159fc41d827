// SPDX-License-Identifier: Apache-2.0
// Several groups of bulk stores on their way at a time.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-bulk-copy
#pragma once

namespace ikbo::device {

// Waits until the stores that this thread committed, but for its last kPending commits, have read
// their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace ikbo::device
