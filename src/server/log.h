// SPDX-License-Identifier: Apache-2.0
// One line per event on stderr: time=... level=... event=... key=value ..., or the same as JSON.
// Nobody waits for who reads it: lines that a pipe has no room for are lost, and their number is a
// line of its own (log_lines_lost) once there is room again.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>

namespace ikbo::server {

enum class LogLevel : std::int8_t { kDebug, kInfo, kWarning, kError };
enum class LogFormat : std::int8_t { kText, kJson };

struct LogField {
  LogField(std::string_view name, std::string_view text) : key(name), value(text) {}
  LogField(std::string_view name, std::integral auto number)
      : key(name), value(std::to_string(number)), is_number(true) {}

  std::string_view key;
  std::string value;
  bool is_number = false;
};

// Thread-safe; a line is written whole, unless its reader stops in the middle of one of more than
// 4 KiB.
class Logger {
 public:
  explicit Logger(LogLevel level, LogFormat format = LogFormat::kText)
      : level_(level), format_(format) {}

  bool is_enabled(LogLevel level) const { return level >= level_; }
  void write(LogLevel level, std::string_view event,
             std::initializer_list<LogField> fields = {}) const;

 private:
  LogLevel level_;
  LogFormat format_;
  mutable std::mutex mutex_;  // of writing, and of what follows
  mutable std::int64_t num_lost_ = 0;
  mutable bool is_torn_ = false;  // the last line has no end
};

// The line of an event, with its end.
std::string log_line(LogFormat format, LogLevel level, std::string_view event,
                     std::initializer_list<LogField> fields);

}  // namespace ikbo::server
