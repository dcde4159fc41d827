// SPDX-License-Identifier: Apache-2.0
// Shared-memory barriers (mbarrier) and named barriers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once

#include <cstdint>

#include "kernels/device/smem_address.cuh"

namespace ikbo::device {

// In a build with IKBO_RANDOM_DELAYS, up to a microsecond around every use of a barrier: what only
// works because one role happens to be slow shows in the results. Nothing in any other build.
__device__ __forceinline__ void random_delay() {
#ifdef IKBO_RANDOM_DELAYS
  std::uint32_t bits = static_cast<std::uint32_t>(clock64()) * 2654435761u ^ threadIdx.x / 32;
  bits ^= bits >> 15;
  if (bits % 4 == 0) __nanosleep(bits / 4 % 1024);
#endif
}

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_bytes(std::uint32_t barrier, int bytes) {
  random_delay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  random_delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase has ended, without waiting.
__device__ __forceinline__ bool mbarrier_test(std::uint32_t barrier, int parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// NOTE: the wait is bounded. A pipeline that stalls for seconds is a bug; the trap turns it into an
// error of the launch instead of a hung device.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, int parity) {
#pragma unroll 1
  for (int attempt = 0; attempt < 100'000'000; ++attempt) {
    std::uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) {
      random_delay();
      return;
    }
  }
  asm volatile("trap;");
}

// Barrier `id` (1..15; 0 is __syncthreads) over `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  random_delay();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts the calling threads in without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  random_delay();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ikbo::device
