// SPDX-License-Identifier: Apache-2.0
#include "runtime/archive.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zip.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "ikbo/error.h"
#include "runtime/zip_directory.h"

namespace ikbo::runtime {
namespace {

struct CloseFile {
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};

// libzip's own text for one of its error codes.
std::string text_of(int code) {
  zip_error_t error;
  zip_error_init_with_code(&error, code);
  std::string text = zip_error_strerror(&error);
  zip_error_fini(&error);
  return text;
}

// Reads a file at any place.
ReadAt reader_of(int descriptor) {
  return [descriptor](std::uint64_t offset, std::size_t count) {
    std::vector<std::byte> bytes(count);
    const ssize_t got = ::pread(descriptor, bytes.data(), count, static_cast<off_t>(offset));
    bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    return bytes;
  };
}

std::uint64_t file_size(int descriptor) {
  struct stat status{};
  return ::fstat(descriptor, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

bool stays_below(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != std::string_view::npos) {
    return false;
  }
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") {
      return false;
    }
    begin = end + 1;
  }
  return true;
}

// Of two lists of names that differ.
std::string first_difference(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  const auto [in_a, in_b] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return "\"" + (in_b == b.end() ? "" : *in_b) + "\" is also \"" + (in_a == a.end() ? "" : *in_a) +
         "\"";
}

}  // namespace

void Archive::Close::operator()(zip* handle) const { zip_discard(handle); }

Archive::File::~File() { ::close(descriptor_); }

Archive::Archive(std::string path, std::unique_ptr<File> file, Handle handle)
    : path_(std::move(path)), file_(std::move(file)), handle_(std::move(handle)) {}

std::shared_ptr<const Archive> Archive::open_file(const std::string& path) {
  // NOTE: without O_NONBLOCK a pipe would be waited for, for ever.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  IKBO_CHECK(descriptor >= 0, path, ": cannot be opened as a .pt2 archive (",
             std::generic_category().message(errno), ")");
  auto file = std::make_unique<File>(descriptor);
  int code = ZIP_ER_OPEN;
  const int copy = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);  // libzip closes the one it is given
  Handle handle(copy < 0 ? nullptr : zip_fdopen(copy, 0, &code));
  IKBO_CHECK(handle != nullptr, path, ": cannot be opened as a .pt2 archive (", text_of(code),
             "); it must be a complete zip file written by ikbo.package");
  const std::shared_ptr<const Archive> archive(
      new Archive(path, std::move(file), std::move(handle)));
  archive->check_entry_names(directory_names(path, file_size(descriptor), reader_of(descriptor)));
  return archive;
}

std::shared_ptr<const Archive> Archive::open_memory(std::span<const std::byte> bytes,
                                                    const std::string& name) {
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* source = zip_source_buffer_create(bytes.data(), bytes.size(), 0, &error);
  Handle handle(source == nullptr ? nullptr : zip_open_from_source(source, ZIP_RDONLY, &error));
  if (handle == nullptr && source != nullptr) {
    zip_source_free(source);
  }
  const int code = zip_error_code_zip(&error);
  zip_error_fini(&error);
  IKBO_CHECK(handle != nullptr, name, ": cannot be opened as a .pt2 archive (", text_of(code),
             "); it must be a complete zip file written by ikbo.package");
  const std::shared_ptr<const Archive> archive(new Archive(name, nullptr, std::move(handle)));
  archive->check_entry_names(
      directory_names(name, bytes.size(), [bytes](std::uint64_t offset, std::size_t count) {
        const std::span<const std::byte> part = bytes.subspan(offset, count);
        return std::vector<std::byte>(part.begin(), part.end());
      }));
  return archive;
}

std::string Archive::open_path() const {
  return file_ == nullptr ? path_ : "/proc/self/fd/" + std::to_string(file_->descriptor());
}

// PyTorch unpacks entries into files of their names, as the directory spells them, and finds them
// in any case. libzip takes the name of an entry's Unicode Path field instead, where it has one.
void Archive::check_entry_names(const std::vector<std::string>& spelled) const {
  const std::vector<std::string> names = entries();
  IKBO_CHECK(names == spelled, path_, ": entries must have one name each; ",
             first_difference(names, spelled), ": package the model again");
  std::set<std::string> lower_names;
  for (const std::string& name : names) {
    IKBO_CHECK(stays_below(name), path_, ": entry \"", name,
               "\" must be named by a relative path without '..' and '\\'");
    std::string lower = name;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    IKBO_CHECK(lower_names.insert(lower).second, path_, ": entry \"", name,
               "\" must be there once, in upper or lower case; it is there twice");
  }
}

std::vector<std::string> Archive::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  const zip_int64_t count = zip_get_num_entries(handle_.get(), 0);
  for (zip_int64_t i = 0; i < count; ++i) {
    const char* name = zip_get_name(handle_.get(), static_cast<zip_uint64_t>(i), ZIP_FL_ENC_RAW);
    IKBO_CHECK(name != nullptr, path_, ": entry ", i, " has no readable name (",
               zip_strerror(handle_.get()), ")");
    names.emplace_back(name);
  }
  return names;
}

std::vector<std::byte> Archive::read(const std::string& entry, std::size_t max_bytes) const {
  const std::lock_guard lock(mutex_);
  zip_stat_t stat;
  IKBO_CHECK(zip_stat(handle_.get(), entry.c_str(), ZIP_FL_ENC_RAW, &stat) == 0, path_,
             ": entry \"", entry, "\" is missing (", zip_strerror(handle_.get()), ")");
  IKBO_CHECK((stat.valid & ZIP_STAT_SIZE) != 0 && stat.size <= max_bytes, path_, ": entry \"",
             entry, "\" must have at most ", max_bytes, " bytes; got ", stat.size);
  const std::unique_ptr<zip_file_t, CloseFile> file(zip_fopen_index(handle_.get(), stat.index, 0));
  IKBO_CHECK(file != nullptr, path_, ": entry \"", entry, "\" cannot be read (",
             zip_strerror(handle_.get()), ")");

  std::vector<std::byte> bytes(stat.size);
  std::size_t filled = 0;
  // One read beyond the last byte: that is where libzip compares the checksum.
  std::byte beyond{};
  while (true) {
    const bool full = filled == bytes.size();
    const zip_int64_t got =
        full ? zip_fread(file.get(), &beyond, 1)
             : zip_fread(file.get(), bytes.data() + filled, bytes.size() - filled);
    IKBO_CHECK(got >= 0, path_, ": entry \"", entry, "\" is damaged (",
               zip_file_strerror(file.get()), ")");
    IKBO_CHECK(full == (got == 0), path_, ": entry \"", entry, "\" must have ", bytes.size(),
               " bytes as the archive's directory says; got ",
               full ? "more" : std::to_string(filled));
    if (full) {
      return bytes;
    }
    filled += static_cast<std::size_t>(got);
  }
}

void Archive::scan(const std::string& entry,
                   const std::function<void(std::span<const std::byte>)>& visit) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::byte> buffer(std::size_t{1} << 20);
  const std::unique_ptr<zip_file_t, CloseFile> file(
      zip_fopen(handle_.get(), entry.c_str(), ZIP_FL_ENC_RAW));
  IKBO_CHECK(file != nullptr, path_, ": entry \"", entry, "\" cannot be read (",
             zip_strerror(handle_.get()), ")");
  while (true) {
    const zip_int64_t got = zip_fread(file.get(), buffer.data(), buffer.size());
    IKBO_CHECK(got >= 0, path_, ": entry \"", entry, "\" is damaged (",
               zip_file_strerror(file.get()), "); package the model again");
    if (got == 0) {
      return;
    }
    visit(std::span(buffer).first(static_cast<std::size_t>(got)));
  }
}

}  // namespace ikbo::runtime
