// SPDX-License-Identifier: Apache-2.0
// Runs an AOTInductor package, on the CPU or on a GPU. It and registered_ops.cpp are the files of
// the runtime with PyTorch's C++ headers; neither CUDA's headers nor its libraries are needed to
// build.
//
// Threads: the loader holds `num_sessions` instances of the compiled model and hands one to each
// run; constructing a loader is not thread-safe in PyTorch, hence the process-wide mutex.
//
// A run on a GPU, all of it on the session's stream, which the host waits for once, at the end:
//
//   inputs -> one pinned block -> one block of the GPU -> compiled code -> pinned outputs
//
// PyTorch's caching allocators hold every block back until the stream is done with it, also where
// a run fails half-way.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/headeronly/version.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <string_view>
#include <utility>

#include "ikbo/error.h"
#include "runtime/compiled_code.h"
#include "runtime/cuda_device.h"
#include "runtime/executor.h"
#include "runtime/package_ops.h"

namespace ikbo::runtime {
namespace {

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

// Calls into PyTorch; what they throw becomes an ikbo::Error that begins with `context`.
template <typename Call>
auto guarded(const std::string& context, const Call& call) {
  std::string reason;
  try {
    return call();
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  IKBO_CHECK(false, context, ": ", reason);
}

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

// The GPU that packages run on: the first that the process sees.
c10::Device gpu() { return {c10::DeviceType::CUDA, 0}; }

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

using Loader = torch::inductor::AOTIModelPackageLoader;

std::unique_ptr<Loader> load_program(const Package& package, const std::string& name, int runs) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const bool is_on_gpu = package.manifest().device == "cuda";
  return guarded(package.path() + ": cannot be loaded", [&] {
    return std::make_unique<Loader>(package.archive().open_path(), name,
                                    /*run_single_threaded=*/false, static_cast<std::size_t>(runs),
                                    is_on_gpu ? gpu().index() : c10::DeviceIndex{-1});
  });
}

// A loaded program, shared by the executors of all sessions.
class CompiledModel {
 public:
  CompiledModel(const Package& package, const Program& program, int num_sessions)
      : manifest_(program.manifest), loader_(load_program(package, program.name, num_sessions)) {}

  // Runs `call` with the loader. It returns the outputs, dense and in host memory.
  template <typename Call>
  std::vector<Tensor> run(const Call& call) const {
    const std::vector<at::Tensor> results = guarded(
        "model " + manifest_.model_name + ": the compiled code failed (its log has the cause)",
        [&] { return call(*loader_); });
    IKBO_CHECK(results.size() == manifest_.outputs.size(), "model ", manifest_.model_name,
               ": the compiled code must return ", manifest_.outputs.size(), " outputs; got ",
               results.size());
    std::vector<Tensor> outputs;
    outputs.reserve(results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      outputs.push_back(to_tensor(results[i], manifest_.outputs[i]));
    }
    return outputs;
  }

 private:
  Tensor to_tensor(const at::Tensor& result, const TensorSpec& spec) const {
    IKBO_CHECK(result.scalar_type() == to_torch(spec.dtype), "model ", manifest_.model_name,
               ": output ", spec.name, " must be ", name_of(spec.dtype),
               " as the manifest says; the compiled code returned ",
               c10::toString(result.scalar_type()));
    return {spec.dtype, result.sizes().vec(), std::make_shared<at::Tensor>(result),
            result.const_data_ptr(), result.nbytes()};
  }

  Manifest manifest_;
  std::unique_ptr<Loader> loader_;
};

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
  explicit CpuExecutor(std::shared_ptr<const CompiledModel> model) : model_(std::move(model)) {}

  std::vector<Tensor> run(const RunInputs& inputs) override {
    // Gives a thread that is new to PyTorch the process's intra-op thread count.
    at::internal::lazy_init_num_threads();
    const c10::InferenceMode inference_mode;
    return model_->run([&](Loader& loader) { return own(loader.boxed_run(wrap(inputs)), inputs); });
  }

 private:
  std::shared_ptr<const CompiledModel> model_;
};

// The inputs, copied to the GPU in one piece.
std::vector<at::Tensor> to_gpu(const RunInputs& inputs) {
  constexpr std::size_t kAlignment = 256;  // what compiled code may take an input's address for
  std::vector<std::size_t> offsets;
  std::size_t total = 0;
  for (const TensorView& view : inputs.tensors) {
    offsets.push_back(total);
    total += (view.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  const at::TensorOptions bytes(at::kByte);
  const auto size = static_cast<std::int64_t>(total);
  const at::Tensor pinned = at::empty({size}, bytes.pinned_memory(true));
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    if (inputs.tensors[i].bytes > 0) {
      std::memcpy(pinned.mutable_data_ptr<std::uint8_t>() + offsets[i], inputs.tensors[i].data,
                  inputs.tensors[i].bytes);
    }
  }
  const at::Tensor block = at::empty({size}, bytes.device(gpu()));
  block.copy_(pinned, /*non_blocking=*/true);
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    const TensorView& view = inputs.tensors[i];
    tensors.push_back(
        block
            .narrow(0, static_cast<std::int64_t>(offsets[i]), static_cast<std::int64_t>(view.bytes))
            .view(to_torch(view.dtype))
            .view(view.shape));
  }
  return tensors;
}

// Starts to copy results to the host.
std::vector<at::Tensor> to_host(std::vector<at::Tensor> results) {
  for (at::Tensor& result : results) {
    const at::Tensor dense = result.contiguous();
    result = at::empty_like(dense, dense.options().device(at::kCPU).pinned_memory(true));
    result.copy_(dense, /*non_blocking=*/true);
  }
  return results;
}

class GpuExecutor final : public Executor {
 public:
  explicit GpuExecutor(std::shared_ptr<const CompiledModel> model)
      : model_(std::move(model)),
        stream_(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(gpu())) {
  }

  std::shared_ptr<Executor> for_session() override { return std::make_shared<GpuExecutor>(model_); }

  std::vector<Tensor> run(const RunInputs& inputs) override {
    const c10::InferenceMode inference_mode;
    const c10::StreamGuard on_stream(stream_);
    try {
      return model_->run([&](Loader& loader) {
        std::vector<at::Tensor> outputs = to_host(loader.boxed_run(to_gpu(inputs)));
        stream_.synchronize();
        return outputs;
      });
    } catch (const Error& error) {
      try {
        stream_.synchronize();  // a device that works can
      } catch (const std::exception&) {
        throw DeviceError(error.what());
      }
      throw;
    }
  }

 private:
  std::shared_ptr<const CompiledModel> model_;
  c10::Stream stream_;
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
  auto model = std::make_shared<const CompiledModel>(package, program, options.num_sessions);
  if (package.manifest().device == "cuda") {
    return std::make_shared<GpuExecutor>(std::move(model));
  }
  return std::make_shared<CpuExecutor>(std::move(model));
}

}  // namespace ikbo::runtime
