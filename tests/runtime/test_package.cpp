// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "fixtures.h"
#include "runtime/archive.h"

namespace ikbo::runtime::testing {
namespace {

using Entries = std::map<std::string, std::string>;

Package open_bytes(const std::vector<std::byte>& bytes) {
  return Package::from_archive(Archive::open_memory(bytes, "memory.pt2"));
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(Package, OpensAFileAndReadsBesideTheManifest) {
  const TempFolder folder;
  const std::string path =
      folder.write("m.pt2", archive_bytes({{"model/extra/ikbo/manifest.json", manifest_json()},
                                           {"model/extra/ikbo/replay/a/x.bin", "payload"},
                                           {"model/data/manifest.json", "{}"},
                                           {"replay/a/x.bin", "elsewhere"}}));
  const Package package = Package::open(path);
  EXPECT_EQ(package.path(), path);
  EXPECT_EQ(package.manifest().model_name, "ranker");
  EXPECT_EQ(text_of(package.read("replay/a/x.bin", 7)), "payload");
}

TEST(Package, OpensAnArchiveWithoutATopFolder) {
  const auto bytes =
      archive_bytes({{"extra/ikbo/manifest.json", manifest_json()}, {"extra/ikbo/empty.bin", ""}});
  EXPECT_TRUE(open_bytes(bytes).read("empty.bin", 0).empty());
}

TEST(Package, LimitsWhatItReads) {
  const auto bytes = archive_bytes(
      {{"m/extra/ikbo/manifest.json", manifest_json()}, {"m/extra/ikbo/x.bin", "12345678"}});
  const Package package = open_bytes(bytes);
  expect_contains(error_of([&] { package.read("x.bin", 7); }),
                  "memory.pt2: entry \"m/extra/ikbo/x.bin\" must have at most 7 bytes; got 8");
  expect_contains(error_of([&] { package.read("y.bin", 7); }),
                  "memory.pt2: entry \"m/extra/ikbo/y.bin\" is missing");
}

TEST(Package, LimitsTheManifest) {
  const std::string huge = std::string((std::size_t{16} << 20) + 1, ' ');
  const auto bytes = archive_bytes({{"m/extra/ikbo/manifest.json", huge}});
  expect_contains(error_of([&] { open_bytes(bytes); }), "must have at most 16777216 bytes");
}

TEST(Package, RefusesAnAbsentFile) {
  expect_contains(error_of([] { Package::open("/nowhere/m.pt2"); }),
                  "/nowhere/m.pt2: cannot be opened as a .pt2 archive (No such file");
}

TEST(Package, RefusesAFolder) {
  expect_contains(error_of([] { Package::open("/"); }), "/: cannot be opened as a .pt2 archive");
}

TEST(Package, RefusesAForeignFile) {
  const TempFolder folder;
  const std::string path = folder.write("m.pt2", std::vector<std::byte>(1000, std::byte{'x'}));
  expect_contains(error_of([&] { Package::open(path); }),
                  path + ": cannot be opened as a .pt2 archive (Not a zip archive)");
  const std::string empty = folder.write("empty.pt2", {});
  EXPECT_NE(error_of([&] { Package::open(empty); }), "");
}

TEST(Package, RefusesAForeignArchive) {
  const auto bytes = archive_bytes({{"model/notextra/ikbo/manifest.json", manifest_json()},
                                    {"model/xextra/ikbo/manifest.json", manifest_json()}});
  expect_contains(error_of([&] { open_bytes(bytes); }),
                  "memory.pt2: holds no extra/ikbo/manifest.json; it is not a package that "
                  "ikbo.package wrote");
}

TEST(Package, RefusesTwoManifests) {
  const auto bytes = archive_bytes({{"a/extra/ikbo/manifest.json", manifest_json()},
                                    {"b/extra/ikbo/manifest.json", manifest_json()}});
  expect_contains(error_of([&] { open_bytes(bytes); }),
                  "must hold one extra/ikbo/manifest.json; got \"a/extra/ikbo/manifest.json\" and "
                  "\"b/extra/ikbo/manifest.json\"");
}

TEST(Package, NamesTheFileOfABrokenManifest) {
  const auto bytes = archive_bytes(
      {{"m/extra/ikbo/manifest.json", replaced(manifest_json(), "\"cpu\"", "\"tpu\"")}});
  expect_contains(error_of([&] { open_bytes(bytes); }),
                  "memory.pt2: manifest: device must be cpu or cuda; got \"tpu\"");
}

TEST(Package, RefusesEveryTruncation) {
  const auto whole = archive_bytes({{"m/extra/ikbo/manifest.json", manifest_json()}});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::vector<std::byte> part(whole.begin(), whole.begin() + static_cast<long>(size));
    expect_contains(error_of([&] { open_bytes(part); }), "memory.pt2");
  }
}

TEST(Package, RefusesADamagedEntryThatItDoesNotRead) {
  const std::string name = "m/data/wrapper.so";
  auto bytes = archive_bytes(
      {{"m/extra/ikbo/manifest.json", manifest_json()}, {name, std::string(5000, 'c')}});
  EXPECT_NO_THROW(open_bytes(bytes));
  // Its bytes follow the first appearance of its name.
  const auto at = std::search(bytes.begin(), bytes.end(), name.begin(), name.end(),
                              [](std::byte a, char b) { return a == std::byte(b); });
  ASSERT_NE(at, bytes.end());
  *(at + static_cast<long>(name.size()) + 8) ^= std::byte{0x55};
  expect_contains(error_of([&] { open_bytes(bytes); }),
                  "memory.pt2: entry \"m/data/wrapper.so\" is damaged (");
}

TEST(Package, SurvivesEveryFlippedByte) {
  auto bytes = archive_bytes({{"m/extra/ikbo/manifest.json", manifest_json()}});
  std::size_t refused = 0;
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    bytes[at] ^= std::byte{0x41};
    try {
      // What opens in spite of the change (it hit a time stamp, say) has the checked manifest.
      EXPECT_EQ(open_bytes(bytes).manifest().max_users, 4);
    } catch (const Error&) {
      ++refused;
    }
    bytes[at] ^= std::byte{0x41};
  }
  EXPECT_GT(refused, bytes.size() / 2);
}

}  // namespace
}  // namespace ikbo::runtime::testing
