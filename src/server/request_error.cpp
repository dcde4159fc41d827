// SPDX-License-Identifier: Apache-2.0
#include "server/request_error.h"

#include <algorithm>

namespace ikbo::server {
namespace {

// NOTE: gRPC's clients take 8 KiB of trailers, in which a byte of the text may stand as three.
constexpr std::size_t kMaxText = 2048;

std::string printable(std::string_view text) {
  std::string shown = shortened(text, kMaxText);
  std::replace(shown.begin(), shown.end(), '\0', '?');  // what() would end there
  return shown;
}

}  // namespace

std::string shortened(std::string_view text, std::size_t max_bytes) {
  if (text.size() <= max_bytes) {
    return std::string(text);
  }
  const auto is_inside_character = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  std::size_t end = max_bytes;
  while (end > 0 && is_inside_character(end)) {
    --end;
  }
  return std::string(text.substr(0, end)) + "...";
}

RequestError::RequestError(ErrorKind kind, std::string_view text)
    : std::runtime_error(printable(text)), kind_(kind) {}

}  // namespace ikbo::server
