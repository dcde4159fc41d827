// SPDX-License-Identifier: Apache-2.0
// Appends JSON to a string and places the commas. Nesting is the caller's care.
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ikbo::server {

class JsonWriter {
 public:
  explicit JsonWriter(std::string& out) : out_(out) {}

  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }

  JsonWriter& key(std::string_view name) {
    string(name);
    out_ += ':';
    needs_comma_ = false;
    return *this;
  }

  // Bytes that are no UTF-8 are written as '?': the output is always valid JSON.
  JsonWriter& string(std::string_view text);

  // `text` must be a JSON value.
  JsonWriter& raw(std::string_view text) {
    separate();
    out_ += text;
    return *this;
  }

  JsonWriter& boolean(bool value) {
    separate();
    out_ += value ? "true" : "false";
    return *this;
  }

  // Floating-point values in the fewest digits that read back as the same value; they must be
  // finite.
  template <typename T>
    requires((std::integral<T> && !std::same_as<T, bool>) || std::floating_point<T>)
  JsonWriter& number(T value) {
    separate();
    char text[32];
    const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
    out_.append(text, static_cast<std::size_t>(end - text));
    return *this;
  }

 private:
  void separate() {
    if (needs_comma_) {
      out_ += ',';
    }
    needs_comma_ = true;
  }
  JsonWriter& open(char bracket) {
    separate();
    out_ += bracket;
    needs_comma_ = false;
    return *this;
  }
  JsonWriter& close(char bracket) {
    out_ += bracket;
    needs_comma_ = true;
    return *this;
  }

  std::string& out_;
  bool needs_comma_ = false;
};

}  // namespace ikbo::server
