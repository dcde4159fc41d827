// SPDX-License-Identifier: Apache-2.0
// Elementwise comparison of two host tensors of any dtype.
#pragma once

#include <cstddef>
#include <span>

#include "ikbo/types.h"

namespace ikbo::runtime {

struct Tolerance {
  double atol = 0;
  double rtol = 0;
};

// The element that stands worst against what it may differ by.
struct Difference {
  std::size_t position = 0;
  double got = 0;
  double want = 0;
  double error = 0;    // |got - want|; 0 for equal infinities and two NaNs, infinite for one NaN
  double allowed = 0;  // atol + rtol * |want|

  // error / allowed, the measure of "worst"; infinite when nothing is allowed.
  double share() const;
  bool within() const { return error <= allowed; }
};

// Elements as doubles (int64 beyond 2^53 rounds). Throws ikbo::Error when the byte counts differ.
// No element: no difference.
Difference compare(DType dtype, std::span<const std::byte> got, std::span<const std::byte> want,
                   const Tolerance& tolerance);

}  // namespace ikbo::runtime
