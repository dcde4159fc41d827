// SPDX-License-Identifier: Apache-2.0
// The one error type of ikbo's C++ libraries and the two ways to raise it.
//
// Text of an error: operator or component, argument, requirement, actual value, fix where there is
// one, e.g. "ikbo::lce: cand_to_user must have 1024 elements (= e_cand.size(0)); got 512".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ikbo {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

template <typename... Parts>
[[noreturn]] void throw_error(const char* file, int line, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text << " [" << file << ":" << line << "]";
  throw Error(text.str());
}

}  // namespace detail
}  // namespace ikbo

// Throws ikbo::Error with the streamed parts and the source position unless `cond` holds.
#define IKBO_CHECK(cond, ...)                                       \
  do {                                                              \
    if (!(cond)) {                                                  \
      ::ikbo::detail::throw_error(__FILE__, __LINE__, __VA_ARGS__); \
    }                                                               \
  } while (false)

#define IKBO_UNREACHABLE(msg) ::ikbo::detail::throw_error(__FILE__, __LINE__, "unreachable: ", msg)
