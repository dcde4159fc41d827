// SPDX-License-Identifier: Apache-2.0
#include "server/prometheus_text.h"

namespace ikbo::server {

std::string label(std::string_view name, std::string_view value) {
  std::string text(name);
  text += "=\"";
  for (const char c : value) {
    if (c == '\n') {
      text += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') {
      text += '\\';
    }
    text += c;
  }
  return text + '"';
}

void write_sample(std::string_view name, std::string_view suffix, const std::string& labels,
                  const std::string& value, std::string& out) {
  out.append(name).append(suffix);
  if (!labels.empty()) {
    out.append("{").append(labels).append("}");
  }
  out.append(" ").append(value).append("\n");
}

void write_head(std::string_view name, std::string_view type, std::string_view help,
                std::string& out) {
  out.append("# HELP ").append(name).append(" ").append(help).append("\n");
  out.append("# TYPE ").append(name).append(" ").append(type).append("\n");
}

}  // namespace ikbo::server
