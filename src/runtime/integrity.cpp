// SPDX-License-Identifier: Apache-2.0
#include "runtime/integrity.h"

#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "ikbo/error.h"
#include "runtime/crypto.h"

namespace ikbo::runtime {
namespace {

constexpr std::size_t kSignatureBytes = 64;

std::set<std::string> entry_names(const Archive& archive) {
  const std::vector<std::string> entries = archive.entries();
  return {entries.begin(), entries.end()};
}

std::string sha256_of(const Archive& archive, const std::string& entry) {
  Sha256 digest;
  archive.scan(entry, [&](std::span<const std::byte> block) { digest.update(block); });
  return digest.finish();
}

}  // namespace

void check_signature(const Archive& archive, const std::string& folder,
                     std::span<const std::byte> manifest, const PackageTrust& trust) {
  if (trust.keys.empty()) {
    return;
  }
  const std::string entry = folder + kSignatureName;
  IKBO_CHECK(entry_names(archive).contains(entry), archive.path(),
             ": must be signed by a trusted key; it holds no ", kSignatureName,
             ": sign it with `ikbo sign`");
  const std::vector<std::byte> signature = archive.read(entry, kSignatureBytes);
  IKBO_CHECK(is_signed_by_any(trust.keys, manifest, signature), archive.path(),
             ": must be signed by a trusted key; its ", kSignatureName, " is by none of the ",
             trust.keys.size(), " that are trusted, or its manifest was changed");
}

void check_files(const Archive& archive, const std::string& folder, const Manifest& manifest,
                 const PackageTrust& trust) {
  const std::set<std::string> entries = entry_names(archive);
  if (manifest.files.empty()) {
    IKBO_CHECK(!trust.require_digests && trust.keys.empty(), archive.path(),
               ": its manifest must list the digests of its files; it has none: package the model "
               "again");
    for (const std::string& entry : entries) {
      archive.scan(entry, [](std::span<const std::byte>) {});
    }
    return;
  }
  std::map<std::string_view, std::string_view> listed;
  for (const FileDigest& file : manifest.files) {
    IKBO_CHECK(entries.contains(file.name), archive.path(), ": entry \"", file.name,
               "\", which the manifest lists, is missing");
    listed[file.name] = file.sha256;
  }
  for (const std::string& entry : entries) {
    const std::string actual = sha256_of(archive, entry);
    if (entry == folder + kManifestName || entry == folder + kSignatureName) {
      continue;
    }
    const auto found = listed.find(entry);
    IKBO_CHECK(found != listed.end(), archive.path(), ": entry \"", entry,
               "\" must be listed in files of the manifest; it is not");
    IKBO_CHECK(found->second == actual, archive.path(), ": entry \"", entry,
               "\" must have the SHA-256 ", found->second, " as the manifest says; got ", actual,
               ": the file was changed after it was packaged");
  }
}

}  // namespace ikbo::runtime
