// SPDX-License-Identifier: Apache-2.0
// PyTorch's second library for fp32 GEMMs, for the processors on which it is the faster one.
#pragma once

#include <cstdint>

#include "cpu/aten.h"

namespace ikbo::cpu {

// Whether self + a @ w^T with a [rows, k] and w [m, k] should be onednn_addmm's. False for other
// types than fp32, and for products so small that the cost of a call shows.
bool prefers_onednn(ScalarType dtype, int64_t rows, int64_t m, int64_t k);

// self + a @ w^T as a new tensor; self [rows, m], all fp32, any strides.
Tensor onednn_addmm(const Tensor& self, const Tensor& a, const Tensor& w);

}  // namespace ikbo::cpu
