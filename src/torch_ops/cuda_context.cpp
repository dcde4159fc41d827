// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/cuda_context.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

namespace ikbo::ops {

Stream current_cuda_stream(std::int32_t device) {
  // NOTE: looked up at run time. libtorch_cuda is loaded wherever a CUDA tensor exists; linking
  // against it would keep this library from loading in a process that serves on the CPU alone.
  using Function = AOTITorchError (*)(std::int32_t, void**);
  static const auto current_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(current_stream != nullptr,
                  "ikbo: a CUDA tensor needs libtorch_cuda.so in the process; it is not loaded");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(current_stream(device, &stream));
  return static_cast<Stream>(stream);
}

}  // namespace ikbo::ops
