// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "fixtures.h"
#include "server/body_plan.h"

namespace ikbo::server {
namespace {

using testing::error_of;
using testing::expect_contains;

TEST(BodyPlan, FollowsTheHead) {
  EXPECT_EQ(plan_body({}, 10).size, 0u);
  EXPECT_EQ(plan_body({.content_length = 10}, 10).json_size, std::nullopt);
  EXPECT_EQ(plan_body({.content_length = 10, .content_encoding = "GZip"}, 10).coding,
            Coding::kGzip);
  const BodyPlan plan =
      plan_body({.content_length = 10, .content_encoding = "identity", .json_size = "4"}, 10);
  EXPECT_EQ(plan.size, 10u);
  EXPECT_EQ(plan.json_size, 4u);
  EXPECT_FALSE(plan.is_chunked);
  const BodyPlan chunks = plan_body({.transfer_encoding = "Chunked", .json_size = "9"}, 10);
  EXPECT_TRUE(chunks.is_chunked);
  EXPECT_EQ(chunks.json_size, 9u);
  // The length of the JSON counts unpacked bytes.
  EXPECT_EQ(plan_body({.content_length = 5, .content_encoding = "deflate", .json_size = "8"}, 10)
                .json_size,
            8u);
}

TEST(BodyPlan, RefusesWhatItCannotRead) {
  const auto refused = [](const BodyFields& fields, ErrorKind kind, const std::string& part) {
    const RequestError error = error_of([&] { plan_body(fields, 10); });
    EXPECT_EQ(error.kind(), kind);
    expect_contains(error.what(), part);
  };
  for (const char* coding : {"", "gzip", "gzip, chunked", "chunked, chunked", "identity"}) {
    refused({.transfer_encoding = coding}, ErrorKind::kBadRequest,
            std::string("Transfer-Encoding must be chunked; got ") + coding);
  }
  refused({.content_length = 5, .content_encoding = "br"}, ErrorKind::kUnsupportedEncoding,
          "got Content-Encoding: br");
  refused({.content_length = 11}, ErrorKind::kBodyTooLarge, "at most 10 bytes");
  for (const char* text : {"", "x", "-1", "6", "5 ", "99999999999999999999999"}) {
    refused({.content_length = 5, .json_size = text}, ErrorKind::kBadRequest,
            "must be a number up to Content-Length (5)");
  }
}

}  // namespace
}  // namespace ikbo::server
