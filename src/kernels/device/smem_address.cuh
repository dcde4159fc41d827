// SPDX-License-Identifier: Apache-2.0
// Addresses of shared memory as instructions take them: 32 bits, in the shared window.
#pragma once

#include <cstdint>

namespace ikbo::device {

__device__ __forceinline__ std::uint32_t smem_address(const void* s_pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(s_pointer));
}

}  // namespace ikbo::device
