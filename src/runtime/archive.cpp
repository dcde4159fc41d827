// SPDX-License-Identifier: Apache-2.0
#include "runtime/archive.h"

#include <zip.h>

#include <utility>

#include "ikbo/error.h"

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

}  // namespace

void Archive::Close::operator()(zip* handle) const { zip_discard(handle); }

Archive::Archive(std::string path, Handle handle)
    : path_(std::move(path)), handle_(std::move(handle)) {}

std::shared_ptr<const Archive> Archive::open_file(const std::string& path) {
  int code = 0;
  Handle handle(zip_open(path.c_str(), ZIP_RDONLY, &code));
  IKBO_CHECK(handle != nullptr, path, ": cannot be opened as a .pt2 archive (", text_of(code),
             "); it must be a complete zip file written by ikbo.package");
  return std::shared_ptr<const Archive>(new Archive(path, std::move(handle)));
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
  return std::shared_ptr<const Archive>(new Archive(name, std::move(handle)));
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

void Archive::verify() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::byte> buffer(std::size_t{1} << 20);
  const zip_int64_t count = zip_get_num_entries(handle_.get(), 0);
  for (zip_int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<zip_uint64_t>(i);
    const char* name = zip_get_name(handle_.get(), index, ZIP_FL_ENC_RAW);
    const std::string entry = name == nullptr ? std::to_string(i) : name;
    const std::unique_ptr<zip_file_t, CloseFile> file(zip_fopen_index(handle_.get(), index, 0));
    IKBO_CHECK(file != nullptr, path_, ": entry \"", entry, "\" cannot be read (",
               zip_strerror(handle_.get()), ")");
    zip_int64_t got = 1;
    while (got > 0) {
      got = zip_fread(file.get(), buffer.data(), buffer.size());
    }
    IKBO_CHECK(got == 0, path_, ": entry \"", entry, "\" is damaged (",
               zip_file_strerror(file.get()), "); package the model again");
  }
}

}  // namespace ikbo::runtime
