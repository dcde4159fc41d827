// SPDX-License-Identifier: Apache-2.0
#include <string_view>
#include <utility>

#include "ikbo/error.h"
#include "ikbo/runtime/model.h"
#include "runtime/archive.h"
#include "runtime/crypto.h"
#include "runtime/integrity.h"

namespace ikbo::runtime {
namespace {

// Where ikbo.package puts it, below the archive's own top folder.
constexpr std::string_view kManifestEntry = "extra/ikbo/manifest.json";
// A manifest of a large model (its compilation spec included) has some hundred kilobytes.
constexpr std::size_t kMaxManifestBytes = std::size_t{16} << 20;

bool is_manifest(std::string_view entry) {
  return entry.ends_with(kManifestEntry) &&
         (entry.size() == kManifestEntry.size() ||
          entry[entry.size() - kManifestEntry.size() - 1] == '/');
}

std::string find_manifest(const Archive& archive) {
  std::string found;
  for (const std::string& entry : archive.entries()) {
    if (is_manifest(entry)) {
      IKBO_CHECK(found.empty(), archive.path(), ": must hold one ", kManifestEntry, "; got \"",
                 found, "\" and \"", entry, "\"");
      found = entry;
    }
  }
  IKBO_CHECK(!found.empty(), archive.path(), ": holds no ", kManifestEntry,
             "; it is not a package that ikbo.package wrote");
  return found;
}

}  // namespace

void check_trusted_keys(const PackageTrust& trust) { check_public_keys(trust.keys); }

Package::Package(std::shared_ptr<const Archive> archive, std::string folder, Manifest manifest)
    : archive_(std::move(archive)), folder_(std::move(folder)), manifest_(std::move(manifest)) {}

Package Package::open(const std::string& path, const PackageTrust& trust) {
  return from_archive(Archive::open_file(path), trust);
}

Package Package::from_archive(std::shared_ptr<const Archive> archive, const PackageTrust& trust) {
  const std::string entry = find_manifest(*archive);
  const std::string folder = entry.substr(0, entry.rfind('/') + 1);
  const std::vector<std::byte> bytes = archive->read(entry, kMaxManifestBytes);
  check_signature(*archive, folder, bytes, trust);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Manifest manifest = parse_manifest(text, archive->path() + ": manifest");
  // A package holds machine code: one that is not as it was written must not be loaded.
  check_files(*archive, folder, manifest, trust);
  return {std::move(archive), folder, std::move(manifest)};
}

const std::string& Package::path() const { return archive_->path(); }

std::vector<std::byte> Package::read(const std::string& entry, std::size_t max_bytes) const {
  return archive_->read(folder_ + entry, max_bytes);
}

}  // namespace ikbo::runtime
