// SPDX-License-Identifier: Apache-2.0
// Lines of Prometheus' text exposition format 0.0.4.
#pragma once

#include <charconv>
#include <string>
#include <string_view>

namespace ikbo::server {

// A number in the fewest digits that read back as the same value.
template <typename T>
std::string text_of(T value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

// "name=\"value\"", escaped.
std::string label(std::string_view name, std::string_view value);

// `labels` without braces.
void write_sample(std::string_view name, std::string_view suffix, const std::string& labels,
                  const std::string& value, std::string& out);

void write_head(std::string_view name, std::string_view type, std::string_view help,
                std::string& out);

}  // namespace ikbo::server
