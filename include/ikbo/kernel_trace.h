// SPDX-License-Identifier: Apache-2.0
// A hook that tells which kernel each operator launched, for ikbo-replay and for tests.
#pragma once

#define IKBO_OPS_API __attribute__((visibility("default")))

extern "C" {

// `op` is the operator's name without the namespace ("linear"), `kernel` the text that
// select_<op>_config prints; both are valid during the call only. Must not throw.
typedef void (*ikbo_kernel_trace_fn)(const char* op, const char* kernel, void* user);

// Installs `callback` for the whole process, or removes it when null. Thread-safe: calls of the
// callback are serialised, and none is running once this function has returned. The callback must
// not call this function.
IKBO_OPS_API void ikbo_set_kernel_trace(ikbo_kernel_trace_fn callback, void* user);
}
