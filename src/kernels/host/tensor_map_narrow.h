// SPDX-License-Identifier: Apache-2.0
// Tensor maps of boxes with rows narrower than 128 bytes.
#pragma once

#include "kernels/host/tensor_map.h"

namespace ikbo::host {

// Like make_tensor_map, for boxes whose rows are 32, 64 or 128 bytes: swizzled over as many.
CUtensorMap make_narrow_tensor_map(const TensorMap3d& spec, const char* what);

}  // namespace ikbo::host
