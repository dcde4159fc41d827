// SPDX-License-Identifier: Apache-2.0
// PyTorch's current CUDA stream, without CUDA's or ATen's headers.
#pragma once

#include <cstdint>

#include "ikbo/stream.h"

namespace ikbo::ops {

Stream current_cuda_stream(std::int32_t device);

}  // namespace ikbo::ops
