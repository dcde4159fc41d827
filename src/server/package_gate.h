// SPDX-License-Identifier: Apache-2.0
// Which packages this process may open: every one that it loads comes through here.
#pragma once

#include <string>
#include <vector>

#include "ikbo/runtime/model.h"
#include "server/log.h"

namespace ikbo::server {

struct PackageGate {
  std::vector<std::string> folders;  // packages must lie below one of them; empty: anywhere
  runtime::PackageTrust trust;
};

// Throws ikbo::Error for a folder that is none or a key that is no key.
void check_gate(const PackageGate& gate);

// Opens the file that `path` leads to, links and ".." resolved. Throws ikbo::Error where it lies
// outside of the folders or is not trusted.
runtime::Package open_package(const std::string& path, const PackageGate& gate);

void warn_of_missing_digests(const runtime::Package& package, const Logger& logger);

}  // namespace ikbo::server
