// SPDX-License-Identifier: Apache-2.0
// Candidates of one user within a warp.
#pragma once

namespace ikbo::device {

// The lanes of this warp that have the same user; all lanes take part, those without a candidate
// with a user of -1. One of them acts for all: neighbours in a sorted list have one user, and a
// warp's additions to one address take as long as its lanes are many.
struct Peers {
  unsigned lanes;
  int lane;

  __device__ __forceinline__ explicit Peers(int user)
      : lanes(__match_any_sync(~0u, user)), lane(static_cast<int>(threadIdx.x) % 32) {}
  __device__ __forceinline__ bool is_first() const { return __ffs(lanes) - 1 == lane; }
  __device__ __forceinline__ int count() const { return __popc(lanes); }
  __device__ __forceinline__ int before() const { return __popc(lanes & ((1u << lane) - 1)); }
  __device__ __forceinline__ int from_first(int value) const {
    return __shfl_sync(~0u, value, __ffs(lanes) - 1);
  }
};

}  // namespace ikbo::device
