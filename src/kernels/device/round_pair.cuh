// SPDX-License-Identifier: Apache-2.0
// Two fp32 values rounded to 16 bits, in one register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ikbo::device {

template <typename Element>
__device__ __forceinline__ std::uint32_t round_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

}  // namespace ikbo::device
