// SPDX-License-Identifier: Apache-2.0
// Read-only view of a zip archive (a .pt2 file is one), over libzip. PyTorch reads the same file
// with a reader of its own, after what libzip saw was checked: an archive that two readers could
// read differently is refused.
#pragma once

#include <cstddef>
#include <functional>
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
  // A path of the file that is open, whatever has been put in its place since; as long as this
  // lives. Of an archive in memory: its name.
  std::string open_path() const;
  std::vector<std::string> entries() const;
  // The uncompressed bytes of an entry, its checksum verified; throws when it is absent, damaged or
  // larger than `max_bytes`. Memory is bounded by `max_bytes` whatever the archive claims.
  std::vector<std::byte> read(const std::string& entry, std::size_t max_bytes) const;
  // Reads an entry to its end, in little memory, and calls `visit` with each block; throws, naming
  // the entry, when it is damaged.
  void scan(const std::string& entry,
            const std::function<void(std::span<const std::byte>)>& visit) const;

 private:
  struct Close {
    void operator()(zip* handle) const;
  };
  using Handle = std::unique_ptr<zip, Close>;

  // A file descriptor; none in memory.
  class File {
   public:
    explicit File(int descriptor) : descriptor_(descriptor) {}
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int descriptor() const { return descriptor_; }

   private:
    int descriptor_;
  };

  Archive(std::string path, std::unique_ptr<File> file, Handle handle);
  // `spelled`: their names as the archive's directory has them.
  void check_entry_names(const std::vector<std::string>& spelled) const;

  std::string path_;
  std::unique_ptr<File> file_;
  mutable std::mutex mutex_;
  Handle handle_;
};

}  // namespace ikbo::runtime
