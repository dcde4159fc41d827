// SPDX-License-Identifier: Apache-2.0
// Dense row-major host tensors as they cross the runtime's boundary. No torch types here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ikbo/types.h"

namespace ikbo::runtime {

using Shape = std::vector<std::int64_t>;

// A tensor somebody else owns. `data` holds `bytes` bytes, row-major, without padding.
struct TensorView {
  DType dtype = DType::kFloat32;
  Shape shape;
  const void* data = nullptr;  // may be nullptr when bytes == 0
  std::size_t bytes = 0;

  // No tensor at all: every tensor of a package has at least its batch dimension.
  bool is_absent() const { return shape.empty() && data == nullptr; }
};

// A tensor with its storage kept alive by `owner`; copying shares the storage.
struct Tensor {
  DType dtype = DType::kFloat32;
  Shape shape;
  std::shared_ptr<const void> owner;
  const void* data = nullptr;
  std::size_t bytes = 0;

  TensorView view() const { return {dtype, shape, data, bytes}; }
};

}  // namespace ikbo::runtime
