// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "fixtures.h"
#include "ikbo/error.h"
#include "server/spec_cost.h"

namespace ikbo::server {
namespace {

using testing::expect_contains;
using testing::replaced;

double value_of(std::string_view text, std::int64_t users, std::int64_t candidates) {
  Formula formula;
  formula.add(text);
  return formula.at(users, candidates);
}

TEST(Formula, IsAPolynomialInUsersAndCandidates) {
  EXPECT_EQ(value_of("0", 3, 5), 0);
  EXPECT_EQ(value_of("7", 3, 5), 7);
  EXPECT_EQ(value_of("U", 3, 5), 3);
  EXPECT_EQ(value_of("B^2", 3, 5), 25);
  EXPECT_EQ(value_of("8*U*B^2 + 2.5*B + 1e+20*U + -4", 3, 5), 8 * 3 * 25 + 12.5 + 3e20 - 4);
  EXPECT_EQ(value_of("-2*U^3 + U*B", 3, 5), -54 + 15);
}

TEST(Formula, AddsUp) {
  Formula formula;
  formula.add("2*U + 3");
  formula.add("5*U + B");
  EXPECT_EQ(formula.at(10, 1), 74);
}

TEST(Formula, RefusesAnythingElse) {
  for (const char* text : {"", "2*", "U^", "U^x", "UB", "2*C", "2 * U", "2+U", "nan", "1e999"}) {
    EXPECT_THROW(value_of(text, 1, 1), Error) << text;
  }
}

std::string spec() {
  return R"({"version": 1, "rows": [
    {"flops_before": "10*B", "flops_after": "6*U + B", "bytes_before": "4*B", "bytes_after": "4*U"},
    {"flops_before": "2*B", "flops_after": "2*B", "bytes_before": "0", "bytes_after": "8"}],
    "variants": [{"form": "transformed", "users": [1, 8], "candidates": [5, 100]},
                 {"form": "replicated", "users": [1, 8], "candidates": [1, 4]}]})";
}

TEST(SpecCosts, AreTheSumsOverTheRowsOfTheFormThatRuns) {
  const SpecCosts costs = SpecCosts::of_spec(spec());
  ASSERT_TRUE(costs.are_known());
  EXPECT_EQ(costs.replicated_at(2, 50).flops, 600);
  EXPECT_EQ(costs.replicated_at(2, 50).bytes, 200);
  EXPECT_EQ(costs.at(2, 50).flops, 162);
  EXPECT_EQ(costs.at(2, 50).bytes, 16);
  EXPECT_EQ(costs.at(2, 4).flops, 48);
  EXPECT_EQ(costs.at(2, 5).flops, 27);
}

TEST(SpecCosts, AreUnknownWithoutASpecOrOfAnotherVersion) {
  EXPECT_FALSE(SpecCosts().are_known());
  EXPECT_FALSE(SpecCosts::of_spec("").are_known());
  EXPECT_FALSE(SpecCosts::of_spec("{}").are_known());
  EXPECT_FALSE(
      SpecCosts::of_spec(replaced(spec(), "\"version\": 1", "\"version\": 2")).are_known());
}

TEST(SpecCosts, SayWhatIsWrongWithASpec) {
  const auto expect_error = [](const std::string& from, const std::string& to,
                               const std::string& part) {
    try {
      SpecCosts::of_spec(replaced(spec(), from, to));
      ADD_FAILURE() << "expected an error about " << part;
    } catch (const Error& error) {
      expect_contains(error.what(), part);
    }
  };
  expect_error("\"6*U + B\"", "\"6*X\"", "a sum of terms like 8*U*B^2; got 6*X");
  expect_error("\"4*U\"", "7", "bytes_after must be a string");
  expect_error("\"rows\"", "\"lines\"", "rows must be an array");
  expect_error("[1, 4]", "[1]", "candidates of a variant must be two integers; got [1]");
}

}  // namespace
}  // namespace ikbo::server
