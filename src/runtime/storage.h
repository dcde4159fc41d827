// SPDX-License-Identifier: Apache-2.0
// Storage of the tensors that the runtime itself makes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "ikbo/runtime/manifest.h"

namespace ikbo::runtime {

// A cache line, and the widest vector register.
inline constexpr std::size_t kStorageAlignment = 64;

// Uninitialised bytes, aligned to kStorageAlignment. Throws std::bad_alloc.
inline std::shared_ptr<std::byte> allocate_bytes(std::size_t bytes) {
  // std::aligned_alloc wants a multiple of the alignment; at least one so that it is never null.
  const std::size_t rounded = (bytes / kStorageAlignment + 1) * kStorageAlignment;
  void* data = std::aligned_alloc(kStorageAlignment, rounded);
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  return {static_cast<std::byte*>(data), std::free};
}

// An uninitialised tensor of `rows` rows of `spec`.
struct OwnedTensor {
  Tensor tensor;
  std::byte* data = nullptr;  // == tensor.data, writable
};

inline OwnedTensor allocate_rows(const TensorSpec& spec, std::int64_t rows) {
  const std::size_t bytes = static_cast<std::size_t>(rows) * spec.row_bytes();
  const std::shared_ptr<std::byte> storage = allocate_bytes(bytes);
  Shape shape = spec.shape;
  shape[0] = rows;
  return {{spec.dtype, std::move(shape), storage, storage.get(), bytes}, storage.get()};
}

}  // namespace ikbo::runtime
