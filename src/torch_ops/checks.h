// SPDX-License-Identifier: Apache-2.0
// Argument checks of the operators. Every text names operator, argument, requirement and value.
// Callers check in this order: devices, dtypes, ranks, shapes. Index values are the kernel's.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/activation.h"

namespace ikbo::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Named {
  std::string name;
  const Tensor& tensor;
};

// A size with its glossary letter.
struct Dim {
  const char* letter;
  int64_t size;
};

// As PyTorch spells the dtype in Python.
std::string dtype_text(ScalarType dtype);

// "[3, 5]"
std::string list_text(const std::vector<int64_t>& values);

// All on the device of the first.
void check_devices(const char* op, const std::vector<Named>& tensors);

// All float64, float32, bfloat16 or float16, and the same.
void check_float_dtypes(const char* op, const std::vector<Named>& tensors);

void check_dtype(const char* op, const Named& tensor, ScalarType dtype);

// `layout` is the shape in glossary letters, such as "[U, K_user]".
void check_rank(const char* op, const Named& tensor, int64_t rank, const char* layout);

void check_shape(const char* op, const Named& tensor, std::initializer_list<Dim> dims);

Activation checked_activation(const char* op, const std::string& name);

}  // namespace ikbo::ops
