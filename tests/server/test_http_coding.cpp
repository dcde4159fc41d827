// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "fixtures.h"
#include "server/http_coding.h"

namespace ikbo::server {
namespace {

using testing::body_of;
using testing::error_of;
using testing::expect_contains;

MemoryBudget memory(std::size_t{4} << 20);

TEST(HttpCoding, KnowsTheNames) {
  EXPECT_EQ(coding_of(""), Coding::kIdentity);
  EXPECT_EQ(coding_of("identity"), Coding::kIdentity);
  EXPECT_EQ(coding_of(" GZIP "), Coding::kGzip);
  EXPECT_EQ(coding_of("x-gzip"), Coding::kGzip);
  EXPECT_EQ(coding_of("Deflate"), Coding::kDeflate);
  EXPECT_EQ(coding_of("br"), std::nullopt);
  EXPECT_EQ(coding_of("gzip, gzip"), std::nullopt);
  EXPECT_EQ(coding_of("gzi"), std::nullopt);
}

TEST(HttpCoding, FollowsTheWeightsOfTheClient) {
  EXPECT_EQ(wanted_coding(""), Coding::kIdentity);
  EXPECT_EQ(wanted_coding("gzip, deflate, br"), Coding::kGzip);
  EXPECT_EQ(wanted_coding("deflate, gzip"), Coding::kDeflate);
  EXPECT_EQ(wanted_coding("gzip;q=0.2,deflate ; q=0.30"), Coding::kDeflate);
  EXPECT_EQ(wanted_coding("identity;q=1, gzip;q=0.5"), Coding::kIdentity);
  EXPECT_EQ(wanted_coding("gzip;q=0, deflate;q=0.000"), Coding::kIdentity);
  EXPECT_EQ(wanted_coding("*"), Coding::kGzip);
  EXPECT_EQ(wanted_coding("br;q=1.0, *;q=0.1"), Coding::kGzip);
  EXPECT_EQ(wanted_coding("gzip;level=9"), Coding::kIdentity);
  EXPECT_EQ(wanted_coding(",,;;q=,gzip;q=x,"), Coding::kIdentity);
}

// A reply of text and tensors, packed and handed back as the body of a request.
std::shared_ptr<RequestBody> round_trip(Coding coding, const std::string& text,
                                        const std::vector<std::string>& blobs,
                                        std::size_t max_bytes) {
  HttpReply reply;
  reply.text = text;
  for (const std::string& blob : blobs) {
    runtime::Tensor tensor;
    tensor.data = blob.data();
    tensor.bytes = blob.size();
    reply.blobs.push_back(tensor);
  }
  pack_reply(coding, reply);
  EXPECT_TRUE(reply.blobs.empty());
  EXPECT_EQ(reply.headers.at(0).second, coding == Coding::kGzip ? "gzip" : "deflate");
  return unpack_body(*body_of(reply.text), coding, text.size(), max_bytes, memory);
}

TEST(HttpCoding, UnpacksWhatItPacks) {
  std::string noise;
  unsigned state = 1;
  for (int i = 0; i < 300'000; ++i) {
    noise += static_cast<char>((state = state * 1664525u + 1013904223u) >> 24);
  }
  for (const Coding coding : {Coding::kGzip, Coding::kDeflate}) {
    const auto body = round_trip(coding, "{\"a\": 1}", {noise, "", std::string(70'000, 'x')},
                                 std::size_t{1} << 20);
    EXPECT_EQ(body->json(), "{\"a\": 1}");
    ASSERT_EQ(body->binary().size(), 370'000u);
    EXPECT_EQ(std::memcmp(body->binary().data(), noise.data(), noise.size()), 0);
    EXPECT_EQ(body->binary().back(), std::byte('x'));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(body->binary().data()) % kBufferAlignment, 0u);
    EXPECT_EQ(round_trip(coding, noise, {}, noise.size())->json(), noise);
  }
}

TEST(HttpCoding, SmallRepliesStayAsTheyAre) {
  HttpReply reply;
  reply.text = std::string(1023, 'x');
  pack_reply(Coding::kGzip, reply);
  EXPECT_EQ(reply.text.size(), 1023u);
  EXPECT_TRUE(reply.headers.empty());
  reply.text += 'x';
  pack_reply(Coding::kIdentity, reply);
  EXPECT_EQ(reply.text.size(), 1024u);
  pack_reply(Coding::kGzip, reply);
  EXPECT_LT(reply.text.size(), 100u);
}

TEST(HttpCoding, RefusesWhatIsNoneOrTooMuch) {
  HttpReply reply;
  reply.text = std::string(5000, 'x');
  pack_reply(Coding::kGzip, reply);
  const std::string packed = reply.text;
  const auto refused = [](const std::string& bytes, std::optional<std::size_t> json_size,
                          std::size_t max_bytes, ErrorKind kind, const std::string& part) {
    const RequestError error = error_of(
        [&] { unpack_body(*body_of(bytes), Coding::kGzip, json_size, max_bytes, memory); });
    EXPECT_EQ(error.kind(), kind);
    expect_contains(error.what(), part);
  };
  refused(packed, std::nullopt, 4999, ErrorKind::kBodyTooLarge, "at most 4999 bytes once unpacked");
  refused(packed, 5001, 9000, ErrorKind::kBadRequest, "once unpacked (5000); got 5001");
  for (std::size_t size = 0; size < packed.size(); ++size) {
    refused(packed.substr(0, size), std::nullopt, 9000, ErrorKind::kBadRequest, "cut short");
  }
  refused(packed + "y", std::nullopt, 9000, ErrorKind::kBadRequest, "1 bytes are left over");
  std::string damaged = packed;
  damaged[damaged.size() - 6] ^= 1;  // in the checksum
  refused(damaged, std::nullopt, 9000, ErrorKind::kBadRequest, "must be gzip data");
  MemoryBudget little(4999);
  EXPECT_EQ(error_of([&] {
              unpack_body(*body_of(packed), Coding::kGzip, std::nullopt, 9000, little);
            }).kind(),
            ErrorKind::kOutOfMemory);
  EXPECT_EQ(unpack_body(*body_of(packed), Coding::kGzip, std::nullopt, 5000, memory)->json(),
            std::string(5000, 'x'));
  EXPECT_EQ(memory.used(), 0u);
}

}  // namespace
}  // namespace ikbo::server
