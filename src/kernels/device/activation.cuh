// SPDX-License-Identifier: Apache-2.0
// Activations in fp32.
#pragma once

#include "ikbo/activation.h"

namespace ikbo::device {

// The result is rounded to 16 bits: a few units in the last place of fp32 do not count.
__device__ __forceinline__ float sigmoid_fast(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

__device__ __forceinline__ float gelu(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// In place, one branch for all values.
template <int kCount>
__device__ __forceinline__ void activate_fast(Activation activation, float (&v)[kCount]) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = v[i] < 0.0f ? 0.0f : v[i];  // keeps NaN
      break;
    case Activation::kGelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = gelu(v[i]);
      break;
    case Activation::kSilu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] *= sigmoid_fast(v[i]);
      break;
    case Activation::kSigmoid:
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] = sigmoid_fast(v[i]);
      break;
  }
}

// NOTE: a call, so that a kernel that applies it to many values holds one copy of each formula.
__device__ __noinline__ inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
    case Activation::kGelu:
      return gelu(x);
    case Activation::kSilu:
      return x / (1.0f + expf(-x));
    case Activation::kSigmoid:
      return 1.0f / (1.0f + expf(-x));
  }
  return x;
}

}  // namespace ikbo::device
