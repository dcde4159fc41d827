// SPDX-License-Identifier: Apache-2.0
// Position in a ring of slots in shared memory; `phase`, that of the slots' barriers, flips at each
// lap.
#pragma once

namespace ikbo::device {

struct RingPosition {
  int slot = 0;
  int phase = 0;

  __device__ __forceinline__ void advance(int size) {
    if (++slot == size) {
      slot = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count, int size) {
    slot += count;
    while (slot >= size) {
      slot -= size;
      phase ^= 1;
    }
  }
};

// Of a ring whose size is known to the compiler.
template <int kSize>
struct FixedRingPosition : RingPosition {
  __device__ __forceinline__ void advance() { RingPosition::advance(kSize); }
};

}  // namespace ikbo::device
