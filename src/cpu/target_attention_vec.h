// SPDX-License-Identifier: Apache-2.0
// SIMD vectors of the target attention kernels, one width per translation unit: 64 bytes with
// AVX-512, 32 with AVX2, 16 otherwise. The including file is compiled once per instruction set with
// IKBO_ISA naming the namespace, so that no symbol of one is ever linked into another.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ikbo::cpu::IKBO_ISA {

struct BFloat16 {
  std::uint16_t bits;
};
using Half = _Float16;

#if defined(__AVX512F__)
inline constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVecBytes = 32;
#else
inline constexpr int kVecBytes = 16;
#endif

template <class T>
struct VecTraits;
template <>
struct VecTraits<float> {
  typedef float Vec __attribute__((vector_size(kVecBytes)));
  typedef std::int32_t Bits __attribute__((vector_size(kVecBytes)));
};
template <>
struct VecTraits<double> {
  typedef double Vec __attribute__((vector_size(kVecBytes)));
  typedef std::int64_t Bits __attribute__((vector_size(kVecBytes)));
};
template <class T>
using Vec = typename VecTraits<T>::Vec;
template <class T>
inline constexpr int kLanes = kVecBytes / static_cast<int>(sizeof(T));

template <class T>
inline Vec<T> load(const T* src) {
  Vec<T> vec;
  __builtin_memcpy(&vec, src, sizeof(vec));
  return vec;
}

template <class T>
inline void store(T* dst, Vec<T> vec) {
  __builtin_memcpy(dst, &vec, sizeof(vec));
}

template <class T>
inline Vec<T> broadcast(T value) {
  return value - Vec<T>{};
}

// a * b + c, rounded once where the instruction set can. The kernels are compiled without
// contraction: this is the only fused operation, so every copy of a loop rounds alike.
template <class T>
inline Vec<T> multiply_add(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return _mm512_fmadd_ps(a, b, c);
  } else {
    return _mm512_fmadd_pd(a, b, c);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    return _mm256_fmadd_ps(a, b, c);
  } else {
    return _mm256_fmadd_pd(a, b, c);
  }
#else
  return a * b + c;
#endif
}

// Lane i of the result is lane i ^ kStep.
template <class T, int kStep, std::size_t... kLane>
inline Vec<T> swap_lanes(Vec<T> vec, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(vec, vec, static_cast<int>(kLane ^ kStep)...);
}

template <class T, int kStep = kLanes<T> / 2, class Op>
inline T reduce(Vec<T> vec, Op op) {
  if constexpr (kStep == 0) {
    return vec[0];
  } else {
    const Vec<T> other = swap_lanes<T, kStep>(vec, std::make_index_sequence<kLanes<T>>{});
    return reduce<T, kStep / 2>(op(vec, other), op);
  }
}

// Not std::max: a NaN in b is kept.
template <class V>
inline V max_of(V a, V b) {
  return a > b ? a : b;
}

// 2^x for x <= 1, within 1.5 units in the last place; 0 below the smallest normal number.
// x = n + r with n an integer and |r| <= 1/2; 2^r is a minimax polynomial (Remez exchange on
// [-1/2, 1/2] with p(0) = 1: relative error 2.6e-9 for float, 1.8e-17 for double).
inline Vec<float> exp2_of(Vec<float> x) {
  using Bits = VecTraits<float>::Bits;
  constexpr float kMin = -126.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves n in the low bits
  const Vec<float> clamped = x < kMin ? broadcast(kMin) : x;
  const Vec<float> shifted = clamped + kRound;
  const Vec<float> r = clamped - (shifted - kRound);
  Vec<float> p = broadcast(1.5594678e-4f);
  for (const float c :
       {1.3406644e-3f, 9.617693e-3f, 5.5503106e-2f, 2.4022653e-1f, 6.9314721e-1f, 1.0f}) {
    p = multiply_add<float>(p, r, broadcast(c));
  }
  const Bits exponent = (reinterpret_cast<Bits>(shifted) << 23) + 0x3f800000;
  return x < kMin ? Vec<float>{} : p * reinterpret_cast<Vec<float>>(exponent);
}

inline Vec<double> exp2_of(Vec<double> x) {
  using Bits = VecTraits<double>::Bits;
  constexpr double kMin = -1022.0;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> clamped = x < kMin ? broadcast(kMin) : x;
  const Vec<double> shifted = clamped + kRound;
  const Vec<double> r = clamped - (shifted - kRound);
  Vec<double> p = broadcast(4.078071929588336665e-10);
  for (const double c :
       {7.0725704128144235096e-9, 1.0180647659234138888e-7, 1.3215442675629822143e-6,
        1.5252727385193868197e-5, 1.540353044157213033e-4, 1.3333558153439964747e-3,
        9.6181291076070023796e-3, 5.5504108664790394552e-2, 2.4022650695910098007e-1,
        6.9314718055994569675e-1, 1.0}) {
    p = multiply_add<double>(p, r, broadcast(c));
  }
  const Bits exponent = (reinterpret_cast<Bits>(shifted) << 52) + 0x3ff0000000000000;
  return x < kMin ? Vec<double>{} : p * reinterpret_cast<Vec<double>>(exponent);
}

// One exchange step of a matrix transpose over pairs of vectors kStep rows apart.
template <class T, int kStep, std::size_t... kLane>
inline void exchange(Vec<T>& a, Vec<T>& b, std::index_sequence<kLane...>) {
  const Vec<T> low = __builtin_shufflevector(
      a, b, static_cast<int>(kLane & kStep ? kLanes<T> + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(
      a, b, static_cast<int>(kLane & kStep ? kLanes<T> + kLane : kLane + kStep)...);
  a = low;
}

// Transposes a square of kLanes rows in registers.
template <class T, int kStep = 1>
inline void transpose(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (kStep < kLanes<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
      if ((i & kStep) == 0) {
        exchange<T, kStep>(rows[i], rows[i + kStep], std::make_index_sequence<kLanes<T>>{});
      }
    }
    transpose<T, kStep * 2>(rows);
  }
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(Half value) { return static_cast<float>(value); }
inline float widen(BFloat16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// Rounds to nearest, ties to even.
template <class Storage, class T>
inline Storage narrow(T value) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    if (value != value) {
      return BFloat16{0x7fc0};
    }
    return BFloat16{static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else {
    return static_cast<Storage>(value);
  }
}

// A vector of 16-bit values, widened.
inline Vec<float> load_wide(const BFloat16* src) {
  typedef std::uint16_t Narrow __attribute__((vector_size(kVecBytes / 2)));
  Narrow bits;
  __builtin_memcpy(&bits, src, sizeof(bits));
  using Bits = VecTraits<float>::Bits;
  return reinterpret_cast<Vec<float>>(__builtin_convertvector(bits, Bits) << 16);
}

inline Vec<float> load_wide(const Half* src) {
#if defined(__AVX512F__)
  // The zero-masked form: GCC warns of its own header's uninitialised operand in the plain one.
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
#else
  return Vec<float>{widen(src[0]), widen(src[1]), widen(src[2]), widen(src[3])};
#endif
}

// Copies n elements that lie `stride` apart into dst, widened, and zero-fills dst up to `padded`.
template <class T, class Storage>
inline void load_row(const Storage* src, std::int64_t stride, int n, T* dst, int padded) {
  int i = 0;
  if (stride == 1) {
    for (; i + kLanes<T> <= n; i += kLanes<T>) {
      if constexpr (std::is_same_v<T, Storage>) {
        store(dst + i, load(src + i));
      } else {
        store<T>(dst + i, load_wide(src + i));
      }
    }
  }
  for (; i < n; ++i) {
    dst[i] = widen(src[i * stride]);
  }
  for (; i < padded; ++i) {
    dst[i] = T{0};
  }
}

}  // namespace ikbo::cpu::IKBO_ISA
