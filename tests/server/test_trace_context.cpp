// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>

#include "server/trace_context.h"

namespace ikbo::server {
namespace {

const std::string kTrace = "0af7651916cd43dd8448eb211c80319c";
const std::string kParent = "b7ad6b7169203331";
const std::string kValid = "00-" + kTrace + "-" + kParent + "-01";

TEST(TraceContext, HasTheIdsTheFlagAndTheState) {
  const auto context = parse_trace_context(kValid, "a=1,b=2");
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(hex_of(context->trace_id), kTrace);
  EXPECT_EQ(hex_of(context->span_id), kParent);
  EXPECT_TRUE(context->is_sampled);
  EXPECT_EQ(context->state, "a=1,b=2");
}

TEST(TraceContext, ReadsTheSampledFlagAlone) {
  const auto is_sampled = [](const char* flags) {
    return parse_trace_context("00-" + kTrace + "-" + kParent + "-" + flags, "")->is_sampled;
  };
  EXPECT_FALSE(is_sampled("00"));
  EXPECT_FALSE(is_sampled("fe"));
  EXPECT_TRUE(is_sampled("03"));
}

TEST(TraceContext, ReadsLaterVersions) {
  EXPECT_TRUE(parse_trace_context("cc-" + kValid.substr(3), "").has_value());
  EXPECT_TRUE(parse_trace_context("cc-" + kValid.substr(3) + "-what-the-future", "").has_value());
  EXPECT_FALSE(parse_trace_context("cc-" + kValid.substr(3) + ".", "").has_value());
}

TEST(TraceContext, RefusesWhatTheRecommendationCallsInvalid) {
  std::string upper = kValid;
  upper[5] = 'F';
  std::string no_hex = kValid;
  no_hex[40] = 'g';
  std::string other_dash = kValid;
  other_dash[35] = '_';
  const std::string invalid[] = {
      "",
      "00",
      kValid.substr(1),
      kValid + "-",
      kValid + "0",
      " " + kValid,
      "ff-" + kValid.substr(3),
      "00-" + std::string(32, '0') + "-" + kParent + "-01",
      "00-" + kTrace + "-" + std::string(16, '0') + "-01",
      "00-" + kTrace + "-" + kParent + "-0x",
      upper,
      no_hex,
      other_dash,
  };
  for (const std::string& text : invalid) {
    EXPECT_FALSE(parse_trace_context(text, "a=1").has_value()) << text;
  }
}

TEST(TraceContext, LeavesOutAStateOverItsLimits) {
  const auto state_of = [](const std::string& state) {
    return parse_trace_context(kValid, state)->state;
  };
  EXPECT_EQ(state_of(std::string(512, 'a')).size(), 512u);
  EXPECT_EQ(state_of(std::string(513, 'a')), "");
  std::string members = "a=1";
  for (int i = 1; i < 32; ++i) {
    members += ",a=1";
  }
  EXPECT_EQ(state_of(members), members);
  EXPECT_EQ(state_of(members + ",a=1"), "");
  EXPECT_EQ(state_of("a=\x01"), "");
}

TEST(TraceContext, MakesIdsThatDiffer) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    ids.insert(hex_of(make_trace_id()).substr(0, 16));
    ids.insert(hex_of(make_trace_id()).substr(16));
    ids.insert(hex_of(make_span_id()));
    const double share = random_share();
    EXPECT_TRUE(share >= 0 && share < 1);
  }
  EXPECT_EQ(ids.size(), 3000u);
}

}  // namespace
}  // namespace ikbo::server
