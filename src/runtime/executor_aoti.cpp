// SPDX-License-Identifier: Apache-2.0
// Runs an AOTInductor package on the CPU. The one file of the runtime with PyTorch's C++ headers.
//
// Threads: the loader holds `num_sessions` instances of the compiled model and hands one to each
// run; constructing a loader is not thread-safe in PyTorch, hence the process-wide mutex.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/headeronly/version.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "ikbo/error.h"
#include "runtime/executor.h"
#include "runtime/ops_library.h"

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
  IKBO_CHECK(manifest.device == "cpu", package.path(), ": was compiled for device ",
             manifest.device, "; this runtime runs cpu packages: package the model for the cpu");
  IKBO_CHECK(minor_version(manifest.torch_version) == minor_version(TORCH_VERSION), package.path(),
             ": was compiled by torch ", manifest.torch_version,
             "; this runtime is built with torch ", TORCH_VERSION,
             ": package the model again with that version");
}

void check_op(const Package& package, const OpSchema& op, const std::string& ops_library) {
  const std::size_t dot = op.name.find('.');
  const c10::OperatorName name(op.name.substr(0, dot),
                               dot == std::string::npos ? "" : op.name.substr(dot + 1));
  const std::optional<c10::OperatorHandle> handle = c10::Dispatcher::singleton().findSchema(name);
  IKBO_CHECK(handle.has_value(), package.path(), ": calls ", op.name, ", which operator library ",
             ops_library,
             " does not have; use the library of the ikbo "
             "version that wrote the package, or package the model again");
  const std::string schema = c10::toString(handle->schema());
  IKBO_CHECK(schema == op.schema, package.path(), ": was compiled against ", op.schema,
             "; operator library ", ops_library, " has ", schema,
             ": use the library of the ikbo version that wrote the package, or package the model "
             "again");
}

void check_ops(const Package& package, const std::string& ops_library) {
  if (package.manifest().ops.empty()) {
    return;
  }
  IKBO_CHECK(!ops_library.empty(), package.path(), ": calls ", package.manifest().ops[0].name,
             "; an operator library (libikbo_ops.so) must be given; got none");
  load_ops_library(ops_library);
  for (const OpSchema& op : package.manifest().ops) {
    check_op(package, op, ops_library);
  }
}

using Loader = torch::inductor::AOTIModelPackageLoader;

std::unique_ptr<Loader> load_package(const Package& package, int num_sessions) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return guarded(package.path() + ": cannot be loaded", [&] {
    return std::make_unique<Loader>(package.path(), "model", /*run_single_threaded=*/false,
                                    static_cast<std::size_t>(num_sessions));
  });
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

class AotiExecutor final : public Executor {
 public:
  AotiExecutor(const Package& package, int num_sessions)
      : manifest_(package.manifest()), loader_(load_package(package, num_sessions)) {}

  std::vector<Tensor> run(const RunInputs& inputs) override {
    // Gives a thread that is new to PyTorch the process's intra-op thread count.
    at::internal::lazy_init_num_threads();
    const c10::InferenceMode inference_mode;
    const std::vector<at::Tensor> results = guarded(
        "model " + manifest_.model_name + ": the compiled code failed (its log has the cause)",
        [&] { return own(loader_->boxed_run(wrap(inputs)), inputs); });
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

}  // namespace

std::shared_ptr<Executor> load_executor(const Package& package, const ModelOptions& options) {
  check_platform(package);
  check_ops(package, options.ops_library);
  if (options.threads_per_run > 0) {
    at::set_num_threads(options.threads_per_run);
  }
  return std::make_shared<AotiExecutor>(package, options.num_sessions);
}

}  // namespace ikbo::runtime
