// SPDX-License-Identifier: Apache-2.0
#include "ikbo/device_limits.h"

#include <cuda_runtime_api.h>

#include "kernels/host/cuda_check.h"

namespace ikbo {

DeviceLimits query_device_limits(int device) {
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    IKBO_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device), "ikbo: device limits");
    return value;
  };
  return {.compute_capability = attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                                attribute(cudaDevAttrComputeCapabilityMinor),
          .num_sms = attribute(cudaDevAttrMultiProcessorCount)};
}

}  // namespace ikbo
