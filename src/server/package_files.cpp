// SPDX-License-Identifier: Apache-2.0
#include "server/package_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "ikbo/error.h"

namespace ikbo::server {
namespace {

namespace fs = std::filesystem;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The digits that `text` begins with, without leading zeros.
std::string_view take_digits(std::string_view& text) {
  const auto end = std::find_if_not(text.begin(), text.end(), is_digit);
  std::string_view digits = text.substr(0, static_cast<std::size_t>(end - text.begin()));
  text.remove_prefix(digits.size());
  digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size()));
  return digits;
}

PackageFile open_file(const std::string& path, const OpenPackage& open) {
  const FileIdentity identity = identify_file(path);
  return {path, identity, open(path)};
}

// Each package and each folder once, however many links lead there: a link may even lead back.
std::vector<std::string> packages_below(const std::string& folder) {
  std::vector<std::string> paths;
  std::set<fs::path> known;
  const auto is_new = [&known](const fs::path& path) {
    std::error_code is_gone;
    const fs::path real = fs::canonical(path, is_gone);
    return !is_gone && known.insert(real).second;
  };
  is_new(folder);
  std::error_code error;
  auto entry = fs::recursive_directory_iterator(
      folder, fs::directory_options::follow_directory_symlink, error);
  while (!error && entry != fs::recursive_directory_iterator()) {
    std::error_code is_gone;
    if (entry->is_directory(is_gone)) {
      if (!is_new(entry->path())) {
        entry.disable_recursion_pending();
      }
    } else if (entry->path().extension() == ".pt2" && entry->is_regular_file(is_gone) &&
               is_new(entry->path())) {
      paths.push_back(entry->path().string());
    }
    entry.increment(error);
  }
  IKBO_CHECK(!error, "--model-repository: must be a folder that can be read; got ", folder, ": ",
             error.message());
  return paths;
}

bool is_before(const PackageFile& a, const PackageFile& b) {
  const runtime::Manifest& first = a.package.manifest();
  const runtime::Manifest& second = b.package.manifest();
  return first.model_name != second.model_name
             ? first.model_name < second.model_name
             : is_older_version(first.model_version, second.model_version);
}

void check_unique(const std::vector<PackageFile>& found) {
  for (auto later = found.begin(); later != found.end(); ++later) {
    const runtime::Manifest& added = later->package.manifest();
    for (auto known = found.begin(); known != later; ++known) {
      const runtime::Manifest& manifest = known->package.manifest();
      IKBO_CHECK(
          manifest.model_name != added.model_name || manifest.model_version != added.model_version,
          "--model, --model-repository: name and version must be unique; got model ",
          added.model_name, " version ", added.model_version, " in ", known->path, " and in ",
          later->path);
    }
  }
}

}  // namespace

FileIdentity identify_file(const std::string& path) {
  struct stat status{};
  IKBO_CHECK(stat(path.c_str(), &status) == 0, path, ": must be a file; got ",
             std::strerror(errno));
  constexpr std::int64_t kNanoseconds = 1'000'000'000;
  return {status.st_dev, status.st_ino, status.st_size,
          status.st_mtim.tv_sec * kNanoseconds + status.st_mtim.tv_nsec};
}

bool is_older_version(std::string_view a, std::string_view b) {
  while (!a.empty() && !b.empty()) {
    if (is_digit(a.front()) && is_digit(b.front())) {
      const std::string_view first = take_digits(a);
      const std::string_view second = take_digits(b);
      if (first != second) {
        return std::tuple(first.size(), first) < std::tuple(second.size(), second);
      }
    } else if (a.front() != b.front()) {
      return a.front() < b.front();
    } else {
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.empty() && !b.empty();
}

std::vector<PackageFile> find_packages(const PackageSources& sources, const OpenPackage& open) {
  std::vector<PackageFile> found;
  found.reserve(sources.files.size());
  for (const std::string& path : sources.files) {
    found.push_back(open_file(path, open));
  }
  for (const std::string& folder : sources.folders) {
    const std::vector<std::string> paths = packages_below(folder);
    std::vector<PackageFile> inside;
    inside.reserve(paths.size());
    for (const std::string& path : paths) {
      inside.push_back(open_file(path, open));
    }
    std::ranges::sort(inside, is_before);
    std::ranges::move(inside, std::back_inserter(found));
  }
  check_unique(found);
  return found;
}

}  // namespace ikbo::server
