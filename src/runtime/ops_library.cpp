// SPDX-License-Identifier: Apache-2.0
#include "runtime/ops_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <system_error>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

// Operators are registered once per process and cannot be registered twice, so this is a fact of
// the process. The library is never unloaded: the dispatcher points into it.
struct Loaded {
  std::mutex mutex;
  std::string path;
  void* handle = nullptr;
};

Loaded& loaded() {
  static Loaded instance;
  return instance;
}

}  // namespace

void load_ops_library(const std::string& path) {
  std::error_code error;
  const std::string canonical = std::filesystem::canonical(path, error).string();
  IKBO_CHECK(!error, "operator library \"", path, "\" cannot be opened (", error.message(),
             "); give the path of libikbo_ops.so");
  const std::lock_guard lock(loaded().mutex);
  if (loaded().handle != nullptr) {
    IKBO_CHECK(loaded().path == canonical, "operator library ", canonical,
               " cannot be loaded: this process already uses ", loaded().path);
    return;
  }
  // RTLD_GLOBAL: compiled packages may call the library's C functions by name.
  void* handle = dlopen(canonical.c_str(), RTLD_NOW | RTLD_GLOBAL);
  IKBO_CHECK(handle != nullptr, "operator library ", canonical, " cannot be loaded (", dlerror(),
             ")");
  loaded().handle = handle;
  loaded().path = canonical;
}

void set_kernel_trace(KernelTrace trace, void* user) {
  const std::lock_guard lock(loaded().mutex);
  IKBO_CHECK(loaded().handle != nullptr, "kernel trace: no operator library is loaded");
  constexpr const char* kSymbol = "ikbo_set_kernel_trace";
  void* symbol = dlsym(loaded().handle, kSymbol);
  IKBO_CHECK(symbol != nullptr, "operator library ", loaded().path, " does not export ", kSymbol,
             "; it is not a libikbo_ops.so of this version");
  reinterpret_cast<void (*)(KernelTrace, void*)>(symbol)(trace, user);
}

}  // namespace ikbo::runtime
