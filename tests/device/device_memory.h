// SPDX-License-Identifier: Apache-2.0
// Device buffers for tests: poisoned (every byte 0xFF, NaN in every float type) and fenced by guard
// bands that must stay untouched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/host/cuda_check.h"

namespace ikbo::test {

class GuardedBuffer {
 public:
  static constexpr std::size_t kGuardBytes = 64 * 1024;

  explicit GuardedBuffer(std::size_t bytes) : bytes_(bytes) {
    IKBO_CUDA_CHECK(cudaMalloc(&base_, bytes + 2 * kGuardBytes), "test buffer");
    poison();
  }
  ~GuardedBuffer() { cudaFree(base_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  template <typename T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(base_) + kGuardBytes);
  }
  std::size_t bytes() const { return bytes_; }

  void poison() const {
    IKBO_CUDA_CHECK(cudaMemset(base_, 0xFF, bytes_ + 2 * kGuardBytes), "test buffer");
  }
  bool guards_are_intact() const { return is_poison(0) && is_poison(kGuardBytes + bytes_); }

 private:
  bool is_poison(std::size_t offset) const {
    std::vector<unsigned char> guard(kGuardBytes);
    IKBO_CUDA_CHECK(cudaMemcpy(guard.data(), static_cast<unsigned char*>(base_) + offset,
                               kGuardBytes, cudaMemcpyDeviceToHost),
                    "test buffer");
    for (const unsigned char byte : guard) {
      if (byte != 0xFF) return false;
    }
    return true;
  }

  void* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace ikbo::test
