// SPDX-License-Identifier: Apache-2.0
#include "runtime/unpacked_code.h"

#include <link.h>

#include <cstddef>
#include <filesystem>
#include <system_error>

namespace ikbo::runtime {
namespace {

namespace fs = std::filesystem;

void remove_contents(const std::string& folder) {
  std::error_code error;  // what cannot be removed is left to the loader
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    fs::remove_all(entry.path(), error);
  }
}

}  // namespace

std::set<std::string> loaded_libraries() {
  std::set<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* library, std::size_t, void* found) {
        static_cast<std::set<std::string>*>(found)->insert(library->dlpi_name);
        return 0;
      },
      &paths);
  return paths;
}

void remove_unpacked(const std::set<std::string>& before, const std::vector<std::string>& entries) {
  for (const std::string& library : loaded_libraries()) {
    for (const std::string& entry : entries) {
      const std::string suffix = "/" + entry;
      if (library.ends_with(suffix) && !before.contains(library)) {
        remove_contents(library.substr(0, library.size() - suffix.size()));
      }
    }
  }
}

}  // namespace ikbo::runtime
