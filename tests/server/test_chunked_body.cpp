// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <limits>
#include <string>

#include "fixtures.h"
#include "server/chunked_body.h"

namespace ikbo::server {
namespace {

namespace http = boost::beast::http;

// Gives the body of a request to a parser, `step` bytes at a time; the parser's error.
boost::system::error_code parse(std::string_view bytes, std::size_t step, ChunkedBody& body) {
  const std::string head = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
  http::request_parser<http::empty_body> parser;
  parser.body_limit(std::numeric_limits<std::uint64_t>::max());
  boost::system::error_code error;
  parser.put(boost::asio::buffer(head), error);
  EXPECT_FALSE(error);
  body.collect_from(parser);
  parser.eager(true);
  std::size_t end = 0;
  while (!parser.is_done() && end < bytes.size()) {
    end = std::min(end + step, bytes.size());
    const std::size_t used = parser.put(boost::asio::buffer(bytes.data(), end), error);
    bytes.remove_prefix(used);
    end -= used;
    if (error && error != http::error::need_more) {
      return error;
    }
  }
  EXPECT_TRUE(parser.is_done());
  return {};
}

TEST(ChunkedBody, JoinsTheChunks) {
  for (const std::size_t step : {1, 2, 3, 7, 1000}) {
    MemoryBudget memory(64);
    std::shared_ptr<RequestBody> whole;
    {
      ChunkedBody body(15, memory);
      EXPECT_FALSE(parse("5\r\nhello\r\nA;x=1\r\n0123456789\r\n0\r\nX: y\r\n\r\n", step, body));
      EXPECT_EQ(memory.used(), 15u);
      whole = body.finish(6);
    }
    EXPECT_EQ(memory.used(), 15u);
    EXPECT_EQ(whole->json(), "hello0");
    EXPECT_EQ(whole->binary().size(), 9u);
  }
}

TEST(ChunkedBody, AnEmptyOne) {
  MemoryBudget memory(10);
  ChunkedBody body(10, memory);
  EXPECT_FALSE(parse("0\r\n\r\n", 1000, body));
  EXPECT_EQ(body.finish(std::nullopt)->json(), "");
}

TEST(ChunkedBody, StopsAtTheLimit) {
  MemoryBudget memory(100);
  for (const char* bytes : {"b\r\n", "5\r\nhello\r\n6\r\n", "5\r\nhello\r\nffffffffffffffff\r\n"}) {
    ChunkedBody body(10, memory);
    const auto refusal = body.refusal(parse(bytes, 1, body));
    ASSERT_TRUE(refusal.has_value()) << bytes;
    EXPECT_EQ(refusal->kind(), ErrorKind::kBodyTooLarge);
    testing::expect_contains(refusal->what(), "at most 10 bytes (--max-body-bytes)");
  }
  EXPECT_EQ(memory.used(), 0u);
}

TEST(ChunkedBody, NeedsRoomForAChunkBeforeItComes) {
  MemoryBudget memory(8);
  ChunkedBody body(100, memory);
  const auto refusal = body.refusal(parse("5\r\nhello\r\n4\r\n", 1, body));
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->kind(), ErrorKind::kOutOfMemory);
  EXPECT_EQ(memory.used(), 5u);
}

TEST(ChunkedBody, RefusesAJsonLengthBeyondItsEnd) {
  MemoryBudget memory(100);
  ChunkedBody body(100, memory);
  EXPECT_FALSE(parse("5\r\nhello\r\n0\r\n\r\n", 1000, body));
  const RequestError error = testing::error_of([&] { body.finish(6); });
  EXPECT_EQ(error.kind(), ErrorKind::kBadRequest);
  testing::expect_contains(error.what(), "at most the length of the body (5); got 6");
}

TEST(ChunkedBody, NamesNoRefusalForWhatIsMalformed) {
  MemoryBudget memory(100);
  for (const char* bytes : {"x\r\n", "-1\r\n", "3\r\nabcdef\r\n", "11111111111111111\r\n"}) {
    ChunkedBody body(100, memory);
    const auto error = parse(bytes, 1, body);
    EXPECT_TRUE(error) << bytes;
    EXPECT_FALSE(body.refusal(error).has_value()) << bytes;
  }
}

}  // namespace
}  // namespace ikbo::server
