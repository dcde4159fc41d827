// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda_device.h"

#include <dlfcn.h>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

// Of the driver's stable interface, cuda.h: CUresult, CUdevice and CUdevice_attribute are ints.
constexpr int kSuccess = 0;
constexpr int kNoDevice = 100;        // CUDA_ERROR_NO_DEVICE
constexpr int kCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kCapabilityMinor = 76;

class Driver {
 public:
  explicit Driver(const std::string& package)
      : package_(package), library_(dlopen("libcuda.so.1", RTLD_NOW)) {
    IKBO_CHECK(library_ != nullptr, package_, kNeedsGpu, "the NVIDIA driver is absent (", dlerror(),
               ")");
  }

  template <typename... Args>
  void call(const char* name, Args... args) const {
    auto* function = reinterpret_cast<int (*)(Args...)>(dlsym(library_, name));
    IKBO_CHECK(function != nullptr, package_, kNeedsGpu, "the NVIDIA driver has no ", name);
    const int status = function(args...);
    IKBO_CHECK(status != kNoDevice, package_, kNeedsGpu, kSeesNone);
    IKBO_CHECK(status == kSuccess, package_, kNeedsGpu, name, " of the NVIDIA driver returned ",
               status);
  }

  static constexpr const char* kNeedsGpu = ": was compiled for device cuda and needs a GPU; ";
  static constexpr const char* kSeesNone =
      "this process sees none (CUDA_VISIBLE_DEVICES can hide them)";

 private:
  const std::string& package_;
  void* library_;  // never unloaded: PyTorch uses it too
};

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

}  // namespace

int first_gpu_capability(const std::string& package) {
  const Driver driver(package);
  driver.call("cuInit", 0U);
  int count = 0;
  driver.call("cuDeviceGetCount", &count);
  IKBO_CHECK(count > 0, package, Driver::kNeedsGpu, Driver::kSeesNone);
  int device = 0;
  driver.call("cuDeviceGet", &device, 0);
  int major = 0;
  int minor = 0;
  driver.call("cuDeviceGetAttribute", &major, kCapabilityMajor, device);
  driver.call("cuDeviceGetAttribute", &minor, kCapabilityMinor, device);
  return major * 10 + minor;
}

void check_compute_capability(const std::string& package, const Manifest& manifest, int actual) {
  IKBO_CHECK(actual == manifest.compute_capability, package,
             ": was compiled for compute capability ", capability_text(manifest.compute_capability),
             "; this process' first GPU has ", capability_text(actual),
             ": package the model on a GPU of the kind that runs it");
}

void load_torch_cuda(const std::string& package) {
  // libtorch.so is what compiled code links; it is a name for libtorch_cpu and libtorch_cuda.
  for (const char* library : {"libtorch_cuda.so", "libtorch.so"}) {
    IKBO_CHECK(dlopen(library, RTLD_NOW | RTLD_GLOBAL) != nullptr, package,
               ": was compiled for device cuda and needs a PyTorch with CUDA; ", library,
               " cannot be loaded (", dlerror(), ")");
  }
}

}  // namespace ikbo::runtime
