// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "ikbo/error.h"

// Throws ikbo::Error with CUDA's own text when `call` fails; `what` names the op and its sizes.
#define IKBO_CUDA_CHECK(call, what)                           \
  do {                                                        \
    const cudaError_t ikbo_status = (call);                   \
    IKBO_CHECK(ikbo_status == cudaSuccess, what, ": ", #call, \
               " failed: ", cudaGetErrorString(ikbo_status)); \
  } while (false)
