// SPDX-License-Identifier: Apache-2.0
// libikbo_ops.so as the runtime uses it.
#pragma once

#include <string>

namespace ikbo::runtime {

// Called for each kernel launch of an ikbo operator, by the thread that launches.
using KernelTrace = void (*)(const char* op, const char* kernel, void* user);

// Loads the operator library, which registers its operators with PyTorch's dispatcher. A process
// holds one operator library: the same path again does nothing, another path is an error. Throws
// ikbo::Error naming the file. Thread-safe.
void load_ops_library(const std::string& path);

// Has every kernel launch reported to `trace` (nullptr: to nobody). Throws ikbo::Error when no
// operator library is loaded.
void set_kernel_trace(KernelTrace trace, void* user);

}  // namespace ikbo::runtime
