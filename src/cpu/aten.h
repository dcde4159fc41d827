// SPDX-License-Identifier: Apache-2.0
// Calls of PyTorch's own operators through the LibTorch stable ABI, as the CPU kernels need them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>

#include "common/activation.h"

namespace ikbo::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The type in which products are summed: fp32 for 16-bit types, else the type itself.
ScalarType sum_dtype(ScalarType dtype);

// `t` in sum_dtype, `t` itself where it already is.
Tensor widen(const Tensor& t);

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype);

// Rows [begin, begin + count) of dimension 0, a view.
Tensor rows(const Tensor& t, int64_t begin, int64_t count);

Tensor transposed(const Tensor& t);

// out = a @ b
void mm_out(const Tensor& out, const Tensor& a, const Tensor& b);

// out = self + a @ b; `self` may be `out`, or anything that broadcasts to it.
void addmm_out(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b);

// The same per item of dimension 0 of 3-d tensors.
void bmm_out(const Tensor& out, const Tensor& a, const Tensor& b);
void baddbmm_out(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b);

// In place; elementwise.
void apply_activation(const Tensor& t, Activation activation);

}  // namespace ikbo::cpu
