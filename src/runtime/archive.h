// SPDX-License-Identifier: Apache-2.0
// Read-only view of a zip archive (a .pt2 file is one), over libzip.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

struct zip;

namespace ikbo::runtime {

// All methods may be called by several threads (libzip's handle is used under a lock) and throw
// ikbo::Error naming the archive.
class Archive {
 public:
  static std::shared_ptr<const Archive> open_file(const std::string& path);
  // An archive in memory, which must outlive the result; errors call it `name`.
  static std::shared_ptr<const Archive> open_memory(std::span<const std::byte> bytes,
                                                    const std::string& name);

  const std::string& path() const { return path_; }
  std::vector<std::string> entries() const;
  // The uncompressed bytes of an entry, its checksum verified; throws when it is absent, damaged or
  // larger than `max_bytes`. Memory is bounded by `max_bytes` whatever the archive claims.
  std::vector<std::byte> read(const std::string& entry, std::size_t max_bytes) const;
  // Reads every entry to its end, in little memory; throws, naming it, when one is damaged.
  void verify() const;

 private:
  struct Close {
    void operator()(zip* handle) const;
  };
  using Handle = std::unique_ptr<zip, Close>;

  Archive(std::string path, Handle handle);

  std::string path_;
  mutable std::mutex mutex_;
  Handle handle_;
};

}  // namespace ikbo::runtime
