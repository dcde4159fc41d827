// SPDX-License-Identifier: Apache-2.0
// linear without the instructions of one architecture.
#pragma once

#include <cuda_runtime_api.h>

#include "ikbo/linear.h"

namespace ikbo::linear_impl {

// User stage and candidate stage by linear_simt; B and M are not 0.
void run_generic(const LinearParams& params, const DeviceLimits& limits, cudaStream_t stream);

}  // namespace ikbo::linear_impl
