// SPDX-License-Identifier: Apache-2.0
// LCE without the instructions of one architecture: compute capability 8.0 and newer.
#pragma once

#include <cuda_runtime_api.h>

#include "ikbo/lce.h"

namespace ikbo::lce_impl {

// User stage and candidate stage of `config`, which names a generic kernel; B, M and N are not 0.
void run_generic(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
                 cudaStream_t stream);

}  // namespace ikbo::lce_impl
