// SPDX-License-Identifier: Apache-2.0
// The one way to launch a kernel: shared-memory opt-in, programmatic dependence, error text.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/host/cuda_check.h"

namespace ikbo::host {

struct LaunchShape {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;
  bool overlaps_previous = false;  // may start before the grid ahead of it in the stream has ended
  int cluster = 1;                 // CTAs of a cluster, at most 8
};

template <typename... Parameters, typename... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), const LaunchShape& shape,
            cudaStream_t stream, const Arguments&... arguments) {
  if (shape.shared_bytes > 48 * 1024) {
    IKBO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         shape.shared_bytes),
                    what);
  }
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (shape.overlaps_previous) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  IKBO_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

}  // namespace ikbo::host
