// SPDX-License-Identifier: Apache-2.0
#include "server/json_writer.h"

#include <simdjson.h>

namespace ikbo::server {

JsonWriter& JsonWriter::string(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  separate();
  const bool is_utf8 = simdjson::validate_utf8(text.data(), text.size());
  out_ += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out_ += '\\';
      out_ += c;
    } else if (byte < 0x20) {
      out_ += "\\u00";
      out_ += kHex[byte >> 4];
      out_ += kHex[byte & 0xf];
    } else {
      out_ += byte < 0x80 || is_utf8 ? c : '?';
    }
  }
  out_ += '"';
  return *this;
}

}  // namespace ikbo::server
