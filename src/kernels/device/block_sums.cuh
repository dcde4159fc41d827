// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a warp and of a CTA.
#pragma once

namespace ikbo::device {

// Of this lane's value and those of the lanes before it.
template <typename T>
__device__ __forceinline__ T inclusive_sum_of_warp(T sum) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

// Sums of all threads' values before this thread's, and of all.
template <typename T>
struct BlockSums {
  T before;
  T total;
};
// Called by all threads of a CTA of 1024: a value a warp for each lane; `s_warps` may be written
// again right after.
template <int kThreads, typename T>
__device__ inline BlockSums<T> sums_of_block(T value, T (&s_warps)[kThreads / 32]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const T sum = inclusive_sum_of_warp(value);
  if (lane == 31) s_warps[warp] = sum;
  __syncthreads();
  const T of_warps = inclusive_sum_of_warp(s_warps[lane]);  // in each warp alike
  const T before_warp = __shfl_sync(~0u, of_warps, warp > 0 ? warp - 1 : 0);
  const T total = __shfl_sync(~0u, of_warps, 31);
  __syncthreads();
  return {sum - value + (warp > 0 ? before_warp : 0), total};
}

}  // namespace ikbo::device
