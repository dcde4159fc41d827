// SPDX-License-Identifier: Apache-2.0
// Digests and signatures of packages, and archives that two readers could read differently.
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "fixtures.h"
#include "runtime/archive.h"
#include "runtime/crypto.h"

namespace ikbo::runtime::testing {
namespace {

using Entries = std::map<std::string, std::string>;

constexpr const char* kManifest = "m/extra/ikbo/manifest.json";
constexpr const char* kSignature = "m/extra/ikbo/manifest.sig";
constexpr const char* kCode = "m/data/aotinductor/model/code.so";

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string sha256(const std::string& text) {
  Sha256 digest;
  // In two pieces, as a reader brings them.
  digest.update(bytes_of(text).first(text.size() / 2));
  digest.update(bytes_of(text).subspan(text.size() / 2));
  return digest.finish();
}

std::string manifest_with_digests(const Entries& files) {
  std::string list;
  for (const auto& [name, content] : files) {
    list += std::string(list.empty() ? "" : ",") + R"({"name": ")" + name + R"(", "sha256": ")" +
            sha256(content) + R"("})";
  }
  return replaced(manifest_json(), R"("replay": [])", R"("replay": [], "files": [)" + list + "]");
}

// A package with digests of what is in it.
Entries package_entries() {
  Entries entries = {{kCode, "machine code"}, {"m/version", "0"}};
  entries[kManifest] = manifest_with_digests(entries);
  return entries;
}

Package open(const Entries& entries, const PackageTrust& trust = {}) {
  const std::vector<std::byte> bytes = archive_bytes(entries);
  return Package::from_archive(Archive::open_memory(bytes, "memory.pt2"), trust);
}

// A key pair, made anew by each test.
class KeyPair {
 public:
  explicit KeyPair(const char* algorithm = "ED25519")
      : key_(EVP_PKEY_Q_keygen(nullptr, nullptr, algorithm), EVP_PKEY_free) {
    path_ = folder_.write("key.pem", {});
    std::FILE* file = std::fopen(path_.c_str(), "w");
    EXPECT_EQ(PEM_write_PUBKEY(file, key_.get()), 1);
    std::fclose(file);
  }

  const std::string& public_file() const { return path_; }

  std::string sign(const std::string& text) const {
    const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                          EVP_MD_CTX_free);
    std::string signature(64, '\0');
    std::size_t size = signature.size();
    EXPECT_EQ(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()), 1);
    EXPECT_EQ(
        EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(signature.data()), &size,
                       reinterpret_cast<const unsigned char*>(text.data()), text.size()),
        1);
    return signature;
  }

 private:
  TempFolder folder_;
  std::string path_;
  std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key_;
};

TEST(Sha256, IsTheStandards) {
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Integrity, OpensAPackageThatIsAsListed) {
  const Package package = open(package_entries(), {.require_digests = true, .keys = {}});
  ASSERT_EQ(package.manifest().files.size(), 2U);
  EXPECT_EQ(package.manifest().files[0].name, kCode);
}

TEST(Integrity, NamesTheChangedFile) {
  Entries entries = package_entries();
  entries[kCode] = "machine c0de";
  expect_contains(error_of([&] { open(entries); }),
                  "memory.pt2: entry \"m/data/aotinductor/model/code.so\" must have the SHA-256 " +
                      sha256("machine code") + " as the manifest says; got " +
                      sha256("machine c0de"));
}

TEST(Integrity, NamesTheMissingFile) {
  Entries entries = package_entries();
  entries.erase("m/version");
  expect_contains(error_of([&] { open(entries); }),
                  "memory.pt2: entry \"m/version\", which the manifest lists, is missing");
}

TEST(Integrity, NamesTheFileThatIsNotListed) {
  Entries entries = package_entries();
  entries["m/data/aotinductor/model/more.so"] = "";
  expect_contains(error_of([&] { open(entries); }),
                  "memory.pt2: entry \"m/data/aotinductor/model/more.so\" must be listed in files");
  // The manifest of another package inside is one more file.
  Entries nested = package_entries();
  nested["m/other/manifest.json"] = "{}";
  expect_contains(error_of([&] { open(nested); }), "\"m/other/manifest.json\" must be listed");
}

TEST(Integrity, RefusesPackagesWithoutDigestsWhereTheyAreRequired) {
  const Entries old = {{kManifest, manifest_json()}, {kCode, "machine code"}};
  EXPECT_TRUE(open(old).manifest().files.empty());
  expect_contains(error_of([&] { open(old, {.require_digests = true, .keys = {}}); }),
                  "memory.pt2: its manifest must list the digests of its files; it has none");
}

TEST(Integrity, ChecksTheListItself) {
  const std::string digest = sha256("x");
  const auto error_with = [&](const std::string& files) {
    const std::string with = R"("replay": [], "files": )" + files;
    return error_of(
        [&] { parse_manifest(replaced(manifest_json(), R"("replay": [])", with), "manifest"); });
  };
  const std::string entry = R"({"name": "a", "sha256": ")" + digest + R"("})";
  expect_contains(error_with("[]"), "files must be an array with at least one file; got []");
  expect_contains(error_with("[" + entry + "," + entry + "]"), "files[1].name must be unique");
  expect_contains(error_with(R"([{"name": "a", "sha256": "BA78"}])"),
                  "files[0].sha256 must be 64 hexadecimal digits in lower case; got \"BA78\"");
  expect_contains(error_with(R"([{"sha256": "BA78"}])"), "files[0].name is missing");
}

TEST(Integrity, OpensWhatATrustedKeySigned) {
  const KeyPair mine;
  const KeyPair other;
  Entries entries = package_entries();
  entries[kSignature] = mine.sign(entries[kManifest]);
  open(entries);
  open(entries, {.keys = {mine.public_file()}});
  open(entries, {.keys = {other.public_file(), mine.public_file()}});
  expect_contains(error_of([&] { open(entries, {.keys = {other.public_file()}}); }),
                  "memory.pt2: must be signed by a trusted key; its manifest.sig is by none of "
                  "the 1 that are trusted");
}

TEST(Integrity, RefusesTheUnsigned) {
  const KeyPair mine;
  const PackageTrust trust{.keys = {mine.public_file()}};
  Entries entries = package_entries();
  expect_contains(error_of([&] { open(entries, trust); }), "it holds no manifest.sig");
  for (const std::string& signature :
       {std::string(), std::string(63, 'x'), std::string(64, '\0')}) {
    entries[kSignature] = signature;
    expect_contains(error_of([&] { open(entries, trust); }), "its manifest.sig is by none");
  }
  entries[kSignature] = std::string(65, 'x');
  expect_contains(error_of([&] { open(entries, trust); }), "must have at most 64 bytes");
}

TEST(Integrity, RefusesAManifestThatWasChangedAfterSigning) {
  const KeyPair mine;
  Entries entries = package_entries();
  entries[kSignature] = mine.sign(entries[kManifest]);
  entries[kManifest] = replaced(entries[kManifest], "\"version\": \"3\"", "\"version\": \"4\"");
  EXPECT_EQ(open(entries).manifest().model_version, "4");
  expect_contains(error_of([&] { open(entries, {.keys = {mine.public_file()}}); }),
                  "or its manifest was changed");
}

TEST(Integrity, ASignatureCoversNothingWithoutDigests) {
  const KeyPair mine;
  const Entries entries = {
      {kManifest, manifest_json()}, {kSignature, mine.sign(manifest_json())}, {kCode, "any code"}};
  expect_contains(error_of([&] { open(entries, {.keys = {mine.public_file()}}); }),
                  "its manifest must list the digests of its files");
}

TEST(Integrity, RefusesKeysOfAnotherKind) {
  const KeyPair other("ED448");
  const TempFolder folder;
  Entries entries = package_entries();
  entries[kSignature] = std::string(64, 'x');
  expect_contains(error_of([&] { open(entries, {.keys = {other.public_file()}}); }),
                  other.public_file() +
                      ": a trusted key must be a readable PEM file with an "
                      "Ed25519 public key; it holds one of another kind");
  const std::string text = folder.write("key.pem", std::vector<std::byte>(20, std::byte{'x'}));
  expect_contains(error_of([&] { open(entries, {.keys = {text}}); }), "it holds no public key");
  expect_contains(
      error_of([&] { check_trusted_keys({.keys = {"/nowhere.pem"}}); }),
      "/nowhere.pem: a trusted key must be a readable PEM file; this one cannot be opened");
}

TEST(Integrity, RefusesSeveralKeysInAFile) {
  const KeyPair one;
  const KeyPair other;
  const TempFolder folder;
  std::ostringstream both;
  both << std::ifstream(one.public_file()).rdbuf() << std::ifstream(other.public_file()).rdbuf();
  const std::string text = both.str();
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  const std::string file = folder.write("both.pem", {bytes, bytes + text.size()});
  expect_contains(error_of([&] { check_trusted_keys({.keys = {file}}); }),
                  "a trusted key must be alone in its file; this one holds several");
}

TEST(Archive, RefusesNamesThatLeaveTheFolder) {
  for (const char* name : {"../x", "m/../../x", "/etc/x", "m\\..\\x", "m/.."}) {
    expect_contains(error_of([&] { open({{kManifest, manifest_json()}, {name, ""}}); }),
                    "must be named by a relative path without '..'");
  }
  open({{kManifest, manifest_json()}, {"m/..x/y..z/...", ""}});
}

TEST(Archive, RefusesNamesThatDifferInCaseAlone) {
  expect_contains(error_of([&] { open({{kManifest, manifest_json()}, {"m/A", ""}, {"m/a", ""}}); }),
                  "memory.pt2: entry \"m/a\" must be there once");
}

TEST(Archive, RefusesASecondEndRecord) {
  std::vector<std::byte> bytes = archive_bytes({{kManifest, manifest_json()}});
  const std::vector<std::byte> end(bytes.end() - 22, bytes.end());
  Archive::open_memory(bytes, "memory.pt2");
  bytes.insert(bytes.end(), end.begin(), end.end());
  expect_contains(error_of([&] { Archive::open_memory(bytes, "memory.pt2"); }), "memory.pt2: ");
  // One that a comment holds.
  std::vector<std::byte> commented = archive_bytes({{kManifest, manifest_json()}});
  commented[commented.size() - 2] = std::byte{22};
  commented.insert(commented.end(), end.begin(), end.end());
  expect_contains(error_of([&] { Archive::open_memory(commented, "memory.pt2"); }), "memory.pt2: ");
}

std::vector<std::byte> as_bytes(const std::string& text) {
  const std::span<const std::byte> bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

std::string as_text(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// `number`, little endian.
std::string field(std::uint64_t number, std::size_t num_bytes) {
  return {reinterpret_cast<const char*>(&number), num_bytes};
}

// PyTorch's reader goes by the name in the directory, libzip by the one in this field.
TEST(Archive, RefusesAnEntryOfTwoNames) {
  std::string zip = as_text(archive_bytes({{kManifest, manifest_json()}, {"m/z", ""}}));
  const std::string other = "m/b";
  const std::string content = std::string(1, '\1') + field(0x1d82212e, 4) + other;  // CRC of "m/z"
  const std::string unicode_path = "up" + field(content.size(), 2) + content;
  const std::size_t entry = zip.rfind("PK\1\2");
  ASSERT_EQ(zip.substr(entry + 46, 3), "m/z");
  zip.replace(entry + 30, 2, field(unicode_path.size(), 2));
  zip.insert(entry + 49, unicode_path);
  const std::size_t end = zip.size() - 22;
  zip.replace(end + 12, 4, field(end - zip.find("PK\1\2"), 4));
  expect_contains(error_of([&] { Archive::open_memory(as_bytes(zip), "memory.pt2"); }),
                  "entries must have one name each; \"m/z\" is also \"m/b\"");
}

// Some readers look for it before the end record, others at the offset in there.
TEST(Archive, RefusesADirectoryElsewhereThanBeforeTheEndRecord) {
  std::string zip = as_text(archive_bytes({{kManifest, manifest_json()}, {"m/a", ""}}));
  const std::size_t directory = zip.find("PK\1\2");
  zip.insert(zip.size() - 22, zip.substr(directory, zip.size() - 22 - directory));
  expect_contains(error_of([&] { Archive::open_memory(as_bytes(zip), "memory.pt2"); }),
                  "the zip file's directory must end at ");
}

// The same archive with end records of 64 bits, the locator of which says `place`.
std::string with_64_bits(const std::string& zip, std::uint64_t place) {
  const std::string end = zip.substr(zip.size() - 22);
  std::string entries = end.substr(10, 2);
  entries.resize(8);
  const std::string record = "PK\6\6" + field(44, 8) + field(45, 2) + field(45, 2) + field(0, 8) +
                             entries + entries + end.substr(12, 4) + field(0, 4) +
                             end.substr(16, 4) + field(0, 4);
  const std::string locator = "PK\6\7" + field(0, 4) + field(place, 8) + field(1, 4);
  return zip.substr(0, zip.size() - 22) + record + locator + end;
}

TEST(Archive, KnowsEndRecordsOf64Bits) {
  const std::string zip = as_text(archive_bytes({{kManifest, manifest_json()}, {"m/a", ""}}));
  const std::vector<std::byte> good = as_bytes(with_64_bits(zip, zip.size() - 22));
  EXPECT_EQ(Archive::open_memory(good, "memory.pt2")->entries().size(), 2);
  // The record of another directory, where the locator leads: a reader that looks right before the
  // locator finds the one that is there.
  const std::string two = with_64_bits(zip, zip.size() - 22);
  const std::string hidden = two.substr(zip.size() - 22, 56);
  const std::string moved = zip.substr(0, zip.size() - 22) + hidden + zip.substr(zip.size() - 22);
  const std::vector<std::byte> bad = as_bytes(with_64_bits(moved, zip.size() - 22));
  expect_contains(error_of([&] { Archive::open_memory(bad, "memory.pt2"); }),
                  "64-bit end record must be at " + std::to_string(moved.size() - 22));
}

TEST(Archive, DoesNotWaitForAPipe) {
  const TempFolder folder;
  const std::string path = folder.path() + "/m.pt2";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  expect_contains(error_of([&] { Archive::open_file(path); }), path + ": cannot be opened");
}

TEST(Archive, StaysWithTheFileThatItOpened) {
  const TempFolder folder;
  const std::vector<std::byte> first = archive_bytes({{kManifest, manifest_json()}});
  const std::string path = folder.write("m.pt2", first);
  const Package package = Package::open(path);
  ASSERT_EQ(std::rename(folder.write("other.pt2", {}).c_str(), path.c_str()), 0);
  std::FILE* file = std::fopen(package.archive().open_path().c_str(), "rb");
  ASSERT_NE(file, nullptr);
  std::vector<std::byte> read(first.size() + 1);
  read.resize(std::fread(read.data(), 1, read.size(), file));
  std::fclose(file);
  EXPECT_EQ(read, first);
}

}  // namespace
}  // namespace ikbo::runtime::testing
