// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "fixtures.h"
#include "runtime/compare.h"

namespace ikbo::runtime::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <typename T>
Difference compare_values(DType dtype, const std::vector<T>& got, const std::vector<T>& want,
                          const Tolerance& tolerance) {
  return compare(dtype, std::as_bytes(std::span(got)), std::as_bytes(std::span(want)), tolerance);
}

TEST(Compare, FindsTheWorstElementAgainstItsTolerance) {
  // Errors 0.5, 2, 3; allowed 1, 11, 31: the first uses most of its tolerance.
  const Difference difference = compare_values<double>(DType::kFloat64, {0.5, 102, 303},
                                                       {0, 100, 300}, {.atol = 1, .rtol = 0.1});
  EXPECT_EQ(difference.position, 0U);
  EXPECT_EQ(difference.error, 0.5);
  EXPECT_EQ(difference.allowed, 1);
  EXPECT_TRUE(difference.within());
}

TEST(Compare, FailsBeyondTheTolerance) {
  const Difference difference =
      compare_values<float>(DType::kFloat32, {1, 2, 3}, {1, 2.5, 3}, {.atol = 0.25, .rtol = 0});
  EXPECT_EQ(difference.position, 1U);
  EXPECT_EQ(difference.got, 2);
  EXPECT_EQ(difference.want, 2.5);
  EXPECT_FALSE(difference.within());
}

TEST(Compare, AllowsNothingWithoutTolerance) {
  EXPECT_TRUE(compare_values<std::int64_t>(DType::kInt64, {1, -2}, {1, -2}, {}).within());
  EXPECT_FALSE(compare_values<std::int64_t>(DType::kInt64, {1, -2}, {1, -3}, {}).within());
}

TEST(Compare, MatchesInfinityAndNanWithThemselvesOnly) {
  const Tolerance loose{.atol = 1e30, .rtol = 1e30};
  const std::vector<double> same = {kInfinity, -kInfinity, kNan};
  EXPECT_TRUE(compare_values<double>(DType::kFloat64, same, same, loose).within());
  EXPECT_FALSE(compare_values<double>(DType::kFloat64, {kInfinity}, {-kInfinity}, loose).within());
  EXPECT_FALSE(compare_values<double>(DType::kFloat64, {kNan}, {0}, loose).within());
  EXPECT_FALSE(compare_values<double>(DType::kFloat64, {0}, {kNan}, loose).within());
  EXPECT_FALSE(compare_values<double>(DType::kFloat64, {1}, {kInfinity}, loose).within());
  EXPECT_FALSE(compare_values<double>(DType::kFloat64, {kInfinity}, {1}, loose).within());
}

TEST(Compare, ReadsHalfFormats) {
  // 1, 1.5, -2, smallest subnormal, largest, infinity.
  const std::vector<std::uint16_t> half = {0x3c00, 0x3e00, 0xc000, 0x0001, 0x7bff, 0x7c00};
  const std::vector<double> half_values = {1, 1.5, -2, std::ldexp(1, -24), 65504, kInfinity};
  const std::vector<std::uint16_t> brain = {0x3f80, 0x3fc0, 0xc000, 0x7f80};
  const std::vector<double> brain_values = {1, 1.5, -2, kInfinity};
  for (std::size_t i = 0; i < half.size(); ++i) {
    EXPECT_EQ(compare_values<std::uint16_t>(DType::kFloat16, {half[i]}, {half[i]}, {}).got,
              half_values[i]);
  }
  for (std::size_t i = 0; i < brain.size(); ++i) {
    EXPECT_EQ(compare_values<std::uint16_t>(DType::kBFloat16, {brain[i]}, {brain[i]}, {}).got,
              brain_values[i]);
  }
  EXPECT_TRUE(
      std::isnan(compare_values<std::uint16_t>(DType::kFloat16, {0x7e00}, {0x7e00}, {}).got));
}

TEST(Compare, TakesEmptyTensors) {
  EXPECT_TRUE(compare_values<float>(DType::kFloat32, {}, {}, {}).within());
}

TEST(Compare, RefusesTensorsOfOtherSize) {
  expect_contains(error_of([] { compare_values<float>(DType::kFloat32, {1}, {1, 2}, {}); }),
                  "must have 8 bytes; got 4");
}

}  // namespace
}  // namespace ikbo::runtime::testing
