// SPDX-License-Identifier: Apache-2.0
// PyTorch's current CUDA stream and its types as the kernels name them, without CUDA's or ATen's
// headers.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "ikbo/stream.h"
#include "ikbo/types.h"

namespace ikbo::ops {

Stream current_cuda_stream(std::int32_t device);

// Of float64, float32, bfloat16 or float16.
DType kernel_dtype(torch::headeronly::ScalarType dtype);

}  // namespace ikbo::ops
