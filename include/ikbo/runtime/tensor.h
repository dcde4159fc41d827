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

// Calls `visit` with a value of the C++ type that holds `dtype`. False, without a call, for float16
// and bfloat16, which C++20 has no type for.
template <typename Visit>
bool with_native_type(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBool:
      visit(bool{});
      return true;
    case DType::kUInt8:
      visit(std::uint8_t{});
      return true;
    case DType::kInt8:
      visit(std::int8_t{});
      return true;
    case DType::kInt16:
      visit(std::int16_t{});
      return true;
    case DType::kInt32:
      visit(std::int32_t{});
      return true;
    case DType::kInt64:
      visit(std::int64_t{});
      return true;
    case DType::kFloat32:
      visit(float{});
      return true;
    case DType::kFloat64:
      visit(double{});
      return true;
    case DType::kFloat16:
    case DType::kBFloat16:
      return false;
  }
  IKBO_UNREACHABLE("DType");
}

}  // namespace ikbo::runtime
