// SPDX-License-Identifier: Apache-2.0
// Tensor maps for the copy engine.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ikbo/types.h"

namespace ikbo::host {

struct TensorMap3d {
  const void* data = nullptr;
  DType dtype = DType::kFloat16;  // 16-bit
  std::int64_t extent[3] = {};    // innermost first, elements
  std::int64_t stride[2] = {};    // of dimensions 1 and 2, elements
  int box[3] = {};
  int swizzle_bytes = 128;  // 32, 64 or 128; 0: none
};

struct TensorMap4d {
  const void* data = nullptr;
  DType dtype = DType::kFloat16;  // 16-bit
  std::int64_t extent[4] = {};    // innermost first, elements
  std::int64_t stride[3] = {};    // of dimensions 1 to 3, elements
  int box[4] = {};                // 128-byte swizzle
};

// Encode with zero fill outside the tensor. Throw ikbo::Error with `what` and
// the offending sizes when the driver refuses, or for another swizzle.
CUtensorMap make_tensor_map(const TensorMap3d& spec, const char* what);
CUtensorMap make_tensor_map(const TensorMap4d& spec, const char* what);

}  // namespace ikbo::host
