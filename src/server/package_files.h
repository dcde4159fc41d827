// SPDX-License-Identifier: Apache-2.0
// The packages that a configuration names: files, and what is in folders.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/model.h"

namespace ikbo::server {

struct PackageSources {
  std::vector<std::string> files;
  std::vector<std::string> folders;  // every *.pt2 below them
};

// Tells one content of a path from the next, as long as packages are not written in place.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t bytes = 0;
  std::int64_t changed_ns = 0;

  bool operator==(const FileIdentity&) const = default;
};

// Throws ikbo::Error when there is no such file.
FileIdentity identify_file(const std::string& path);

// Opens the package at a path; throws ikbo::Error for one that this process must not open.
using OpenPackage = std::function<runtime::Package(const std::string&)>;

struct PackageFile {
  std::string path;  // as found; the package's own may be that to which links lead
  FileIdentity identity;
  runtime::Package package;
};

// In order: the files, then what is in each folder by name and version. Throws ikbo::Error for a
// file that cannot be opened, a folder that cannot be read, and two packages of one name and
// version.
std::vector<PackageFile> find_packages(const PackageSources& sources, const OpenPackage& open);

// Whether version `a` is older than `b`: runs of digits count as numbers ("9" before "10").
bool is_older_version(std::string_view a, std::string_view b);

}  // namespace ikbo::server
