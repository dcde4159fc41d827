// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "server/log.h"

namespace ikbo::server {
namespace {

// Without the time.
std::string rest_of(LogFormat format, std::initializer_list<LogField> fields) {
  const std::string line = log_line(format, LogLevel::kWarning, "slow", fields);
  const std::size_t at = format == LogFormat::kText ? line.find(" level") : line.find(",\"level");
  return line.substr(at);
}

TEST(LogLine, TextQuotesWhatIsNotPlain) {
  EXPECT_EQ(rest_of(LogFormat::kText, {{"a", "x"}, {"b", 7}, {"c", ""}, {"d", "y \"z\"\n"}}),
            " level=warning event=slow a=x b=7 c=\"\" d=\"y \\\"z\\\" \"\n");
}

TEST(LogLine, TextHasNothingThatATerminalObeys) {
  EXPECT_EQ(rest_of(LogFormat::kText, {{"id", "a\x1b[2Jb\x7f\t\u00e9"}}),
            " level=warning event=slow id=\"a [2Jb  \u00e9\"\n");
}

TEST(LogLine, JsonHasNumbersAndEscapedText) {
  EXPECT_EQ(rest_of(LogFormat::kJson, {{"a", "x"}, {"b", -7}, {"c", ""}, {"d", "y \"z\"\n"}}),
            ",\"level\":\"warning\",\"event\":\"slow\",\"a\":\"x\",\"b\":-7,\"c\":\"\","
            "\"d\":\"y \\\"z\\\"\\u000a\"}\n");
}

}  // namespace
}  // namespace ikbo::server
