// SPDX-License-Identifier: Apache-2.0
// Uninitialised memory that any element type and any vector load may start in.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace ikbo::server {

inline constexpr std::size_t kBufferAlignment = 64;

struct AlignedDelete {
  void operator()(std::byte* data) const {
    ::operator delete[](data, std::align_val_t{kBufferAlignment});
  }
};
using AlignedBuffer = std::unique_ptr<std::byte[], AlignedDelete>;

inline AlignedBuffer make_aligned_buffer(std::size_t bytes) {
  return AlignedBuffer(
      static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kBufferAlignment})));
}

}  // namespace ikbo::server
