// SPDX-License-Identifier: Apache-2.0
// Values for tests on the device, and their comparison.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>

#include "device_memory.h"
#include "ikbo/types.h"

namespace ikbo::test {

// kTernary: -1, 0 or 1. kCodes: integers that tell their place, and weights that pick one of them
// for each output (code_of, picks). Sums of either are exact in fp32.
enum class Values { kNormal, kTernary, kCodes };
inline bool has_exact_sums(Values values) { return values != Values::kNormal; }

// What an operand is to its operator.
enum class Role { kInput, kWeight, kBias };

// What lies in memory between an operand's elements, and in its holes.
enum class Gap { kNaN, kInfinity };

// Rows of operands that are gap instead of elements: unless there are none, the odd users, whom no
// candidate names then, and candidates. kSomeRows: one candidate of 37 and, where a test knows of
// it, one row of w_cand of 41.
enum class Holes { kNone, kOddUsers, kOddCandidates, kEvenCandidates, kSomeRows };

// Rows whose number modulo `period` is `first`; none without a period.
struct PeriodicHole {
  int period = 0;
  int first = 0;
  __host__ __device__ bool holds(std::int64_t row) const {
    return period > 0 && row % period == first;
  }
};

inline PeriodicHole unnamed_users(Holes holes) {
  return holes == Holes::kNone ? PeriodicHole{} : PeriodicHole{2, 1};
}
inline PeriodicHole poisoned_candidates(Holes holes) {
  if (holes == Holes::kOddCandidates) return {2, 1};
  if (holes == Holes::kEvenCandidates) return {2, 0};
  if (holes == Holes::kSomeRows) return {37, 2};
  return {};
}
inline PeriodicHole poisoned_weights(Holes holes) {
  return holes == Holes::kSomeRows ? PeriodicHole{41, 3} : PeriodicHole{};
}

inline double unit_roundoff_of(DType dtype) {
  return dtype == DType::kFloat16    ? 1.0 / 2048
         : dtype == DType::kBFloat16 ? 1.0 / 256
                                     : 1.0 / 16777216;
}

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

// An integer that the neighbours of an element do not share, so small that the sum of two is exact
// in `dtype`.
__device__ inline float code_of(std::int64_t entry, std::int64_t row, std::int64_t column,
                                DType dtype) {
  const std::int64_t prime = dtype == DType::kBFloat16 ? 127 : 1021;
  return static_cast<float>((entry * 101 + row * 17 + column) % prime);
}

// Whether row m of a weight [M, K] of zeros has its one at k.
__device__ inline bool picks(std::int64_t m, std::int64_t k, std::int64_t num_k) {
  return k == (m + 1) % num_k;
}

__global__ void fill_gaps_kernel(void* data, std::int64_t count, DType dtype, float value) {
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    store_value(data, i, dtype, value);
  }
}

// Before the operand's elements are. A GuardedBuffer is NaN from the start.
inline void fill_gaps(const GuardedBuffer& buffer, DType dtype, Gap gap) {
  if (gap == Gap::kNaN) return;
  fill_gaps_kernel<<<512, 256>>>(buffer.data(),
                                 static_cast<std::int64_t>(buffer.bytes() / size_of(dtype)), dtype,
                                 std::numeric_limits<float>::infinity());
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

// Which elements of a result are off by more than their budget, over all threads of a launch.
class WrongElements {
 public:
  struct Counts {
    unsigned long long count = 0;
    unsigned long long first = ~0ull;
    int worst_bits = 0;  // of the largest excess, a float
  };
  WrongElements() : counts_(sizeof(Counts)) {
    const Counts none;
    IKBO_CUDA_CHECK(cudaMemcpy(counts_.data(), &none, sizeof(none), cudaMemcpyHostToDevice),
                    "wrong elements");
  }
  Counts* device() const { return counts_.data<Counts>(); }

  // `excess` of element i: of its error over the budget; NaN is wrong too, 0 and less is not.
  __device__ static void report(Counts* g_counts, std::int64_t i, double excess) {
    if (excess <= 0) return;
    atomicAdd(&g_counts->count, 1ull);
    atomicMin(&g_counts->first, static_cast<unsigned long long>(i));
    const float worst = excess < 3e38 ? fmaxf(static_cast<float>(excess), 1e-37f) : 3e38f;
    atomicMax(&g_counts->worst_bits, __float_as_int(worst));
  }

  // What is wrong with a result of `row_size` elements a row; "" for nothing.
  std::string text(std::int64_t row_size) const {
    Counts counts;
    IKBO_CUDA_CHECK(cudaMemcpy(&counts, counts_.data(), sizeof(counts), cudaMemcpyDeviceToHost),
                    "wrong elements");
    if (counts.count == 0) return "";
    float worst;
    std::memcpy(&worst, &counts.worst_bits, sizeof(worst));
    const auto first = static_cast<std::int64_t>(counts.first);
    std::ostringstream text;
    text << counts.count << " elements are wrong, the first is " << first % row_size << " of row "
         << first / row_size << "; the worst is " << worst << " over its budget";
    return text.str();
  }

 private:
  GuardedBuffer counts_;
};

}  // namespace ikbo::test
