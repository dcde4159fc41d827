// SPDX-License-Identifier: Apache-2.0
#include "server/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdio>
#include <ctime>

#include "server/json_writer.h"

namespace ikbo::server {
namespace {

constexpr std::array<std::string_view, 4> kLevelNames = {"debug", "info", "warning", "error"};

std::string utc_time() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t whole = std::chrono::system_clock::to_time_t(now);
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm parts{};
  gmtime_r(&whole, &parts);
  std::array<char, 32> text{};
  const std::size_t length = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text.data() + length, text.size() - length, ".%03dZ",
                static_cast<int>(milliseconds));
  return text.data();
}

// Values with other characters than these are quoted.
bool is_plain(std::string_view value) {
  for (const char c : value) {
    if (c <= ' ' || c == '"' || c == '\\' || c == '=' || c == '\x7f') {
      return false;
    }
  }
  return !value.empty();
}

void append_value(std::string_view value, std::string& line) {
  if (is_plain(value)) {
    line += value;
    return;
  }
  line += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      line += '\\';
    }
    const auto byte = static_cast<unsigned char>(c);
    line += byte < ' ' || byte == 0x7f ? ' ' : c;  // a terminal would obey them
  }
  line += '"';
}

std::string text_line(LogLevel level, std::string_view event,
                      std::initializer_list<LogField> fields) {
  std::string line = "time=" + utc_time() + " level=";
  line += kLevelNames[static_cast<std::size_t>(level)];
  line += " event=";
  line += event;
  for (const LogField& field : fields) {
    line.append(" ").append(field.key).append("=");
    append_value(field.value, line);
  }
  return line;
}

std::string json_line(LogLevel level, std::string_view event,
                      std::initializer_list<LogField> fields) {
  std::string line;
  JsonWriter json(line);
  json.begin_object();
  json.key("time").string(utc_time());
  json.key("level").string(kLevelNames[static_cast<std::size_t>(level)]);
  json.key("event").string(event);
  for (const LogField& field : fields) {
    json.key(field.key);
    if (field.is_number) {
      json.raw(field.value);
    } else {
      json.string(field.value);
    }
  }
  json.end_object();
  return line;
}

// As much of the text as stderr has room for now.
std::size_t write_some(std::string_view text) {
  constexpr std::size_t kRoom = PIPE_BUF;  // that a pipe which takes anything has
  std::size_t written = 0;
  while (written < text.size()) {
    pollfd room{STDERR_FILENO, POLLOUT, 0};
    if (poll(&room, 1, 0) != 1 || (room.revents & POLLOUT) == 0) {
      break;
    }
    const ssize_t count =
        ::write(STDERR_FILENO, text.data() + written, std::min(text.size() - written, kRoom));
    if (count <= 0) {
      break;
    }
    written += static_cast<std::size_t>(count);
  }
  return written;
}

}  // namespace

std::string log_line(LogFormat format, LogLevel level, std::string_view event,
                     std::initializer_list<LogField> fields) {
  return (format == LogFormat::kJson ? json_line : text_line)(level, event, fields) + '\n';
}

void Logger::write(LogLevel level, std::string_view event,
                   std::initializer_list<LogField> fields) const {
  if (!is_enabled(level)) {
    return;
  }
  const std::lock_guard lock(mutex_);
  std::string text = is_torn_ ? "\n" : "";
  if (num_lost_ > 0) {
    text += log_line(format_, LogLevel::kWarning, "log_lines_lost", {{"lines", num_lost_}});
  }
  const std::size_t of_earlier = text.size();
  text += log_line(format_, level, event, fields);
  const std::size_t written = write_some(text);
  if (written >= of_earlier) {
    num_lost_ = 0;
  }
  if (written < text.size()) {
    ++num_lost_;
  }
  if (written > 0) {
    is_torn_ = text[written - 1] != '\n';
  }
}

}  // namespace ikbo::server
