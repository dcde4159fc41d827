// SPDX-License-Identifier: Apache-2.0
// Which way ikbo::expand takes on the CPU: there is one.
#pragma once

#include <string>

namespace ikbo::cpu {

struct ExpandConfig {};

inline ExpandConfig select_expand_config() { return {}; }

inline std::string to_string(const ExpandConfig&) { return "cpu_copy_rows"; }

}  // namespace ikbo::cpu
