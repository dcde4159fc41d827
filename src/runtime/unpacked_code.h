// SPDX-License-Identifier: Apache-2.0
// The files that PyTorch's loader unpacks a package into, in a new folder below /tmp. It removes
// them when it ends, which a process that is killed, or ends with its models loaded, never sees.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace ikbo::runtime {

// Paths of the shared libraries that this process has loaded.
std::set<std::string> loaded_libraries();

// Removes what was unpacked with the library that was loaded after `before`, which is one of the
// archive's `entries`. The folder itself stays, empty: the loader will remove what is of that name,
// which must not be another user's by then. The library works on; nothing is removed of one that
// is not found.
void remove_unpacked(const std::set<std::string>& before, const std::vector<std::string>& entries);

}  // namespace ikbo::runtime
