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

DType kernel_dtype(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "ikbo: a kernel's dtype must be floating point; got ",
                      torch::headeronly::toString(dtype));
  }
}

}  // namespace ikbo::ops
