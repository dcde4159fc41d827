// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "server/request_error.h"

namespace ikbo::server {
namespace {

TEST(RequestError, QuotesAClientWithinAMetadatasLimit) {
  const RequestError error(ErrorKind::kNotFound, "no model " + std::string(1'000'000, 'x'));
  const std::string_view text = error.what();
  EXPECT_LT(3 * text.size(), 8192);
  EXPECT_TRUE(text.starts_with("no model xxx"));
  EXPECT_TRUE(text.ends_with("x..."));
}

TEST(RequestError, GoesOnBehindAZero) {
  using namespace std::string_literals;
  EXPECT_STREQ(RequestError(ErrorKind::kNotFound, "no model 'a\0b' here"s).what(),
               "no model 'a?b' here");
}

TEST(Shortened, CutsBetweenCharacters) {
  EXPECT_EQ(shortened("abc", 3), "abc");
  EXPECT_EQ(shortened("abcd", 3), "abc...");
  EXPECT_EQ(shortened("a\u00e9\u00e9", 4), "a\u00e9...");
  EXPECT_EQ(shortened("a\u00e9\u00e9", 5), "a\u00e9\u00e9");
  EXPECT_EQ(shortened("\U0001f600b", 3), "...");
}

}  // namespace
}  // namespace ikbo::server
