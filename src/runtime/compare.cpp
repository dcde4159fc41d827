// SPDX-License-Identifier: Apache-2.0
#include "runtime/compare.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double from_float16(std::uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  if (exponent == 0x1f) {
    return mantissa == 0 ? sign * kInfinity : std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(mantissa + 0x400, exponent - 25);
}

double from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

template <typename T>
T load(std::span<const std::byte> bytes, std::size_t position) {
  T value;
  std::memcpy(&value, bytes.data() + position * sizeof(T), sizeof(T));
  return value;
}

double element(DType dtype, std::span<const std::byte> bytes, std::size_t position) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return load<std::uint8_t>(bytes, position);
    case DType::kInt8:
      return load<std::int8_t>(bytes, position);
    case DType::kInt16:
      return load<std::int16_t>(bytes, position);
    case DType::kInt32:
      return load<std::int32_t>(bytes, position);
    case DType::kInt64:
      return static_cast<double>(load<std::int64_t>(bytes, position));
    case DType::kFloat16:
      return from_float16(load<std::uint16_t>(bytes, position));
    case DType::kBFloat16:
      return from_bfloat16(load<std::uint16_t>(bytes, position));
    case DType::kFloat32:
      return load<float>(bytes, position);
    case DType::kFloat64:
      return load<double>(bytes, position);
  }
  IKBO_UNREACHABLE("DType");
}

double error_of(double got, double want) {
  if (got == want || (std::isnan(got) && std::isnan(want))) {
    return 0;
  }
  const double error = std::abs(got - want);
  return std::isnan(error) ? kInfinity : error;
}

double allowed_for(double want, const Tolerance& tolerance) {
  // A value that is not finite has no neighbours to be near to.
  return std::isfinite(want) ? tolerance.atol + tolerance.rtol * std::abs(want) : 0;
}

}  // namespace

double Difference::share() const {
  if (error == 0) {
    return 0;
  }
  return allowed == 0 ? kInfinity : error / allowed;
}

Difference compare(DType dtype, std::span<const std::byte> got, std::span<const std::byte> want,
                   const Tolerance& tolerance) {
  IKBO_CHECK(got.size() == want.size(), "compare: both tensors must have ", want.size(),
             " bytes; got ", got.size());
  Difference worst;
  const std::size_t count = got.size() / size_of(dtype);
  for (std::size_t i = 0; i < count; ++i) {
    Difference here;
    here.position = i;
    here.got = element(dtype, got, i);
    here.want = element(dtype, want, i);
    here.error = error_of(here.got, here.want);
    here.allowed = allowed_for(here.want, tolerance);
    if (i == 0 || here.share() > worst.share()) {
      worst = here;
    }
  }
  return worst;
}

}  // namespace ikbo::runtime
