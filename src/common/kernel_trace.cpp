// SPDX-License-Identifier: Apache-2.0
#include "common/kernel_trace.h"

#include <atomic>
#include <mutex>

#include "ikbo/kernel_trace.h"

namespace ikbo {
namespace {

// The hook is process-wide because a package's operators are called without any context of ours.
std::mutex trace_mutex;
std::atomic<bool> has_callback{false};
ikbo_kernel_trace_fn trace_callback = nullptr;
void* trace_user = nullptr;

}  // namespace

bool is_kernel_traced() { return has_callback.load(std::memory_order_relaxed); }

void report_kernel(const char* op, const std::string& kernel) {
  const std::lock_guard<std::mutex> lock(trace_mutex);
  if (trace_callback != nullptr) {
    trace_callback(op, kernel.c_str(), trace_user);
  }
}

}  // namespace ikbo

void ikbo_set_kernel_trace(ikbo_kernel_trace_fn callback, void* user) {
  const std::lock_guard<std::mutex> lock(ikbo::trace_mutex);
  ikbo::trace_callback = callback;
  ikbo::trace_user = user;
  ikbo::has_callback.store(callback != nullptr, std::memory_order_relaxed);
}
