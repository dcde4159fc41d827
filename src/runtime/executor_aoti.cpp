// SPDX-License-Identifier: Apache-2.0
// Runs an AOTInductor package on the CPU, and loads packages for both devices. It, aoti_model.h,
// executor_gpu.cpp, gpu_staging.cpp and registered_ops.cpp are the files of the runtime with
// PyTorch's C++ headers; neither CUDA's headers nor its libraries are needed to build them.
//
// Threads: the loader holds `num_sessions` instances of the compiled model and hands one to each
// run; constructing a loader is not thread-safe in PyTorch, hence the process-wide mutex.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/headeronly/version.h>

#include <set>
#include <string_view>
#include <utility>

#include "runtime/aoti_model.h"
#include "runtime/compiled_code.h"
#include "runtime/cuda_device.h"
#include "runtime/package_ops.h"
#include "runtime/unpacked_code.h"

namespace ikbo::runtime {

at::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return at::kBool;
    case DType::kUInt8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
  }
  IKBO_UNREACHABLE("DType");
}

std::unique_ptr<CompiledModel::Loader> CompiledModel::load(const Package& package,
                                                           const std::string& name,
                                                           int num_sessions, Entry entry) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const bool is_on_gpu = package.manifest().device == "cuda";
  return guarded(package.path() + ": cannot be loaded", [&] {
    const std::set<std::string> before = loaded_libraries();
    auto loader = std::make_unique<Loader>(
        package.archive().open_path(), name, /*run_single_threaded=*/entry == Entry::kSingle,
        static_cast<std::size_t>(num_sessions), is_on_gpu ? gpu().index() : c10::DeviceIndex{-1});
    if (!is_on_gpu) {  // there kernels are read from files when they first run
      remove_unpacked(before, package.archive().entries());
    }
    return loader;
  });
}

CompiledModel::CompiledModel(const Package& package, const Program& program, int num_sessions,
                             Entry entry)
    : manifest_(program.manifest),
      entry_(entry),
      loader_(load(package, program.name, entry == Entry::kSingle ? 1 : num_sessions, entry)) {}

std::vector<at::Tensor> CompiledModel::run(std::vector<at::Tensor> inputs) const {
  std::unique_lock<std::mutex> lock(single_, std::defer_lock);
  if (entry_ == Entry::kSingle) {
    lock.lock();
  }
  std::vector<at::Tensor> results = guarded(
      "model " + manifest_.model_name + ": the compiled code failed (its log has the cause)",
      [&] { return loader_->boxed_run(std::move(inputs)); });
  IKBO_CHECK(results.size() == manifest_.outputs.size(), "model ", manifest_.model_name,
             ": the compiled code must return ", manifest_.outputs.size(), " outputs; got ",
             results.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const TensorSpec& spec = manifest_.outputs[i];
    IKBO_CHECK(results[i].scalar_type() == to_torch(spec.dtype), "model ", manifest_.model_name,
               ": output ", spec.name, " must be ", name_of(spec.dtype),
               " as the manifest says; the compiled code returned ",
               c10::toString(results[i].scalar_type()));
  }
  return results;
}

namespace {

// "2.11" of "2.11.0+cu130".
std::string_view minor_version(std::string_view version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

void check_platform(const Package& package) {
  const Manifest& manifest = package.manifest();
  IKBO_CHECK(minor_version(manifest.torch_version) == minor_version(TORCH_VERSION), package.path(),
             ": was compiled by torch ", manifest.torch_version,
             "; this runtime is built with torch ", TORCH_VERSION,
             ": package the model again with that version");
}

void start_device(const Package& package) {
  if (package.manifest().device != "cuda") {
    return;
  }
  check_compute_capability(package.path(), package.manifest(),
                           first_gpu_capability(package.path()));
  load_torch_cuda(package.path());
  // NOTE: PyTorch looks for its CUDA library once, when something first asks for it.
  IKBO_CHECK(at::Context::hasCUDA(), package.path(), ": was compiled for device cuda; PyTorch in ",
             "this process has settled for the CPU: load packages for CUDA first");
  guarded(package.path() + ": the GPU cannot be used",
          [] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });
}

std::vector<at::Tensor> wrap(const RunInputs& inputs) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(inputs.tensors.size());
  for (const TensorView& view : inputs.tensors) {
    // Compiled code does not write to its inputs.
    tensors.push_back(at::from_blob(const_cast<void*>(view.data), view.shape,
                                    at::TensorOptions(to_torch(view.dtype))));
  }
  return tensors;
}

bool contains(const TensorView& input, const at::Tensor& output) {
  const auto* begin = static_cast<const std::byte*>(input.data);
  const auto* data = static_cast<const std::byte*>(output.const_data_ptr());
  return data >= begin && data < begin + input.bytes;
}

// Results as dense tensors that own their storage: compiled code may return strided views, and its
// inputs themselves where the model passes them through.
std::vector<at::Tensor> own(std::vector<at::Tensor> results, const RunInputs& inputs) {
  for (at::Tensor& result : results) {
    result = result.contiguous();
    for (const TensorView& input : inputs.tensors) {
      if (contains(input, result)) {
        result = result.clone();
      }
    }
  }
  return results;
}

class CpuExecutor final : public Executor {
 public:
  CpuExecutor(const Package& package, const Program& program, int num_sessions)
      : model_(package, program, num_sessions, Entry::kPooled) {}

  std::vector<Tensor> run(const RunInputs& inputs) override {
    // Gives a thread that is new to PyTorch the process's intra-op thread count.
    at::internal::lazy_init_num_threads();
    const c10::InferenceMode inference_mode;
    std::vector<at::Tensor> results = model_.run(wrap(inputs));
    results = guarded("model " + model_.manifest().model_name + ": the outputs cannot be kept",
                      [&] { return own(std::move(results), inputs); });
    std::vector<Tensor> outputs;
    outputs.reserve(results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      outputs.push_back({model_.manifest().outputs[i].dtype, results[i].sizes().vec(),
                         std::make_shared<at::Tensor>(results[i]), results[i].const_data_ptr(),
                         results[i].nbytes()});
    }
    return outputs;
  }

 private:
  CompiledModel model_;
};

}  // namespace

std::shared_ptr<Executor> load_executor(const Package& package, const ModelOptions& options,
                                        const Program& program) {
  check_platform(package);
  start_device(package);
  check_ops(package, options.ops_library);
  check_compiled_code(package.archive(), program);
  if (options.threads_per_run > 0) {
    at::set_num_threads(options.threads_per_run);
  }
  if (package.manifest().device == "cuda") {
    return make_gpu_executor(package, options, program);
  }
  return std::make_shared<CpuExecutor>(package, program, options.num_sessions);
}

}  // namespace ikbo::runtime
