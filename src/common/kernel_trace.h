// SPDX-License-Identifier: Apache-2.0
// The launching side of ikbo/kernel_trace.h.
#pragma once

#include <string>

namespace ikbo {

// True while a trace callback is installed; one relaxed load.
bool is_kernel_traced();

// Hands one launch to the callback. Callers test is_kernel_traced() first, so that no text is built
// for nothing.
void report_kernel(const char* op, const std::string& kernel);

template <typename Config>
void trace_kernel(const char* op, const Config& config) {
  if (is_kernel_traced()) {
    report_kernel(op, to_string(config));
  }
}

}  // namespace ikbo
