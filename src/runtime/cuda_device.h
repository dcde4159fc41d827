// SPDX-License-Identifier: Apache-2.0
// The GPU of a process, asked without CUDA's headers or libraries at link time.
#pragma once

#include <string>

#include "ikbo/runtime/manifest.h"

namespace ikbo::runtime {

// Compute capability of the first GPU that the process sees, 90 for 9.0. Throws ikbo::Error that
// begins with `package` where there is no driver or no GPU.
int first_gpu_capability(const std::string& package);

// Throws ikbo::Error naming both unless a manifest for CUDA was compiled for `actual`: code for one
// compute capability does not run, or runs out of shared memory, on another.
void check_compute_capability(const std::string& package, const Manifest& manifest, int actual);

// Brings PyTorch's CUDA library into the process, which links only its CPU part. Throws ikbo::Error
// that begins with `package` where PyTorch has none.
void load_torch_cuda(const std::string& package);

}  // namespace ikbo::runtime
