// SPDX-License-Identifier: Apache-2.0
// The directory of a zip archive, read without libzip: to know what other readers see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ikbo::runtime {

// Bytes of the archive; fewer than `count` where it ends or cannot be read.
using ReadAt = std::function<std::vector<std::byte>(std::uint64_t offset, std::size_t count)>;

// The names of all entries as the directory spells them, in its order. Throws ikbo::Error, which
// names `path`, unless the archive of `size` bytes ends with one directory and its one end record.
std::vector<std::string> directory_names(const std::string& path, std::uint64_t size,
                                         const ReadAt& read);

}  // namespace ikbo::runtime
