// SPDX-License-Identifier: Apache-2.0
// Layout: APPNOTE.TXT of PKWARE, 4.3.12 to 4.3.16. Numbers are little endian, as this machine is.
#include "runtime/zip_directory.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

constexpr std::string_view kEntryMark = "PK\1\2";
constexpr std::string_view kEndMark = "PK\5\6";
constexpr std::string_view kEnd64Mark = "PK\6\6";
constexpr std::string_view kLocator64Mark = "PK\6\7";
constexpr std::size_t kEntryBytes = 46;  // without its name, extra fields and comment
constexpr std::size_t kEndBytes = 22;    // without a comment
constexpr std::size_t kEnd64Bytes = 56;
constexpr std::size_t kLocator64Bytes = 20;
constexpr std::size_t kMaxTailBytes = kEndBytes + 0xffff;  // where readers look for an end record
// A package has some hundred entries.
constexpr std::size_t kMaxDirectoryBytes = std::size_t{64} << 20;

template <typename T>
T number_at(std::string_view bytes, std::size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

std::string text_at(const ReadAt& read, std::uint64_t offset, std::size_t count) {
  const std::vector<std::byte> bytes = read(offset, count);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Directory {
  std::uint64_t num_entries;
  std::uint64_t bytes;
  std::uint64_t offset;
  std::uint64_t end;  // where it has to end
};

// What the end records say, the one with 64 bits where there is one. It is looked for right before
// its locator, as Python does, and must be where the locator says, which is where others look.
Directory find_directory(const std::string& path, std::uint64_t size, std::string_view tail) {
  const std::size_t first = tail.find(kEndMark);
  IKBO_CHECK(first != std::string_view::npos && first + kEndBytes == tail.size(), path,
             ": must be a zip file with one end record, in its last ", kEndBytes,
             " bytes; it has more of them, or a comment: package the model again");
  const std::string_view end = tail.substr(first);
  constexpr std::size_t kBefore = kLocator64Bytes + kEnd64Bytes;
  const std::string_view before = first < kBefore ? "" : tail.substr(first - kBefore, kBefore);
  if (before.empty() || !before.substr(kEnd64Bytes).starts_with(kLocator64Mark)) {
    return {number_at<std::uint16_t>(end, 10), number_at<std::uint32_t>(end, 12),
            number_at<std::uint32_t>(end, 16), size - kEndBytes};
  }
  const std::uint64_t place = size - kEndBytes - kBefore;
  const auto located = number_at<std::uint64_t>(before, kEnd64Bytes + 8);
  IKBO_CHECK(before.starts_with(kEnd64Mark) && located == place, path,
             ": the zip file's 64-bit end record must be at ", place, ", before its locator; got ",
             located);
  return {number_at<std::uint64_t>(before, 32), number_at<std::uint64_t>(before, 40),
          number_at<std::uint64_t>(before, 48), place};
}

}  // namespace

std::vector<std::string> directory_names(const std::string& path, std::uint64_t size,
                                         const ReadAt& read) {
  const auto tail_bytes = static_cast<std::size_t>(std::min<std::uint64_t>(size, kMaxTailBytes));
  const std::string tail = text_at(read, size - tail_bytes, tail_bytes);
  const Directory directory = find_directory(path, size, tail);
  IKBO_CHECK(directory.bytes <= std::min<std::uint64_t>(directory.end, kMaxDirectoryBytes) &&
                 directory.offset == directory.end - directory.bytes,
             path, ": the zip file's directory must end at ", directory.end,
             ", before its end record, and have at most ", kMaxDirectoryBytes, " bytes; it has ",
             directory.bytes, " from ", directory.offset);
  const std::string text =
      text_at(read, directory.offset, static_cast<std::size_t>(directory.bytes));
  std::vector<std::string> names;
  std::string_view rest = text;
  while (rest.size() >= kEntryBytes && rest.starts_with(kEntryMark)) {
    const std::size_t name = number_at<std::uint16_t>(rest, 28);
    const std::size_t others =
        std::size_t{number_at<std::uint16_t>(rest, 30)} + number_at<std::uint16_t>(rest, 32);
    if (rest.size() < kEntryBytes + name + others) {
      break;
    }
    names.emplace_back(rest.substr(kEntryBytes, name));
    rest.remove_prefix(kEntryBytes + name + others);
  }
  IKBO_CHECK(
      rest.empty() && text.size() == directory.bytes && names.size() == directory.num_entries, path,
      ": the zip file's directory must have ", directory.num_entries, " entries in ",
      directory.bytes, " bytes; it has ", names.size(), ", and ", rest.size(),
      " bytes of something else");
  return names;
}

}  // namespace ikbo::runtime
