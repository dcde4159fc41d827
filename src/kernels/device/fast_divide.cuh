// SPDX-License-Identifier: Apache-2.0
// Division of numbers below 2^31 by a divisor that the host knows, without the divider.
// Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
#pragma once

#include <cstdint>

namespace ikbo::device {

struct FastDivide {
  std::uint32_t multiplier = 1;
  std::uint32_t shift = 0;

  FastDivide() = default;
  explicit FastDivide(std::int32_t divisor) {
    while ((std::int64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<std::uint32_t>(
        (std::uint64_t{1} << 32) * ((std::uint64_t{1} << shift) - divisor) / divisor + 1);
  }

  __device__ __forceinline__ int operator()(int dividend) const {
    const auto n = static_cast<std::uint32_t>(dividend);
    return static_cast<int>((__umulhi(n, multiplier) + n) >> shift);
  }
};

}  // namespace ikbo::device
