// SPDX-License-Identifier: Apache-2.0
// Values for tests on the device, and their comparison.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "device_memory.h"
#include "ikbo/types.h"

namespace ikbo::test {

// kTernary: -1, 0 or 1, whose sums are exact in fp32.
enum class Values { kNormal, kTernary };

__device__ inline double load_value(const void* data, std::int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[at]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

__device__ inline void store_value(void* data, std::int64_t at, DType dtype, float value) {
  if (dtype == DType::kFloat16) static_cast<__half*>(data)[at] = __float2half(value);
  if (dtype == DType::kBFloat16) static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16(value);
  if (dtype == DType::kFloat32) static_cast<float*>(data)[at] = value;
}

// What `value` is once stored as `dtype`.
__device__ inline double rounded_value(float value, DType dtype) {
  if (dtype == DType::kFloat16) return __half2float(__float2half(value));
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16(value));
  return value;
}

__device__ inline std::uint32_t mix_bits(std::uint64_t x) {
  x ^= x >> 31;
  x *= 0x9E3779B97F4A7C15ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return static_cast<std::uint32_t>(x >> 32);
}

__device__ inline float random_value(Values values, float scale, std::uint64_t seed) {
  if (values == Values::kTernary) {
    return static_cast<float>(static_cast<int>(mix_bits(seed) % 3) - 1);
  }
  const float u1 = (mix_bits(2 * seed) + 1.0f) / 4294967808.0f;
  const float u2 = mix_bits(2 * seed + 1) / 4294967296.0f;
  return scale * sqrtf(-2 * logf(u1)) * cosf(6.2831853f * u2);
}

// The largest excess of an error over its budget, over all threads of a launch.
class WorstExcess {
 public:
  WorstExcess() : bits_(sizeof(int)) {
    IKBO_CUDA_CHECK(cudaMemset(bits_.data(), 0, sizeof(int)), "worst excess");
  }
  int* device() const { return bits_.data<int>(); }
  float read() const {
    int bits = 0;
    IKBO_CUDA_CHECK(cudaMemcpy(&bits, bits_.data(), sizeof(bits), cudaMemcpyDeviceToHost),
                    "worst excess");
    float excess;
    std::memcpy(&excess, &bits, sizeof(excess));
    return excess;
  }

  // A NaN counts as the largest excess; 0 and less as none.
  __device__ static void report(int* g_worst, double excess) {
    if (!(excess < 3e38)) excess = 3e38;
    if (excess > 0) atomicMax(g_worst, __float_as_int(fmaxf(static_cast<float>(excess), 1e-37f)));
  }

 private:
  GuardedBuffer bits_;
};

}  // namespace ikbo::test
