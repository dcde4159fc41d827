// SPDX-License-Identifier: Apache-2.0
#include "server/package_gate.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "ikbo/error.h"

namespace ikbo::server {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPackageFlags = "--model, --model-repository";

fs::path resolved(std::string_view flag, const std::string& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  IKBO_CHECK(!error, flag, ": must be a path that is there; got ", path, ": ", error.message());
  return real;
}

fs::path resolved_folder(const std::string& folder) {
  const fs::path real = resolved("--model-dir", folder);
  IKBO_CHECK(fs::is_directory(real), "--model-dir: must be a folder; got ", folder);
  return real;
}

bool is_below(const fs::path& path, const fs::path& folder) {
  return std::mismatch(path.begin(), path.end(), folder.begin(), folder.end()).second ==
         folder.end();
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) {
    text += (text.empty() ? "" : ", ") + part;
  }
  return text;
}

}  // namespace

void check_gate(const PackageGate& gate) {
  for (const std::string& folder : gate.folders) {
    resolved_folder(folder);
  }
  runtime::check_trusted_keys(gate.trust);
}

runtime::Package open_package(const std::string& path, const PackageGate& gate) {
  const fs::path real = resolved(kPackageFlags, path);
  const bool is_inside =
      gate.folders.empty() ||
      std::any_of(gate.folders.begin(), gate.folders.end(), [&](const std::string& folder) {
        return is_below(real, resolved_folder(folder));
      });
  IKBO_CHECK(is_inside, kPackageFlags, ": must lie below --model-dir, ", joined(gate.folders),
             "; got ", path, real == path ? "" : ", which is " + real.string());
  return runtime::Package::open(real.string(), gate.trust);
}

void warn_of_missing_digests(const runtime::Package& package, const Logger& logger) {
  if (package.manifest().files.empty()) {
    logger.write(LogLevel::kWarning, "package_without_digests", {{"path", package.path()}});
  }
}

}  // namespace ikbo::server
