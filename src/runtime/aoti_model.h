// SPDX-License-Identifier: Apache-2.0
// A program of a package that AOTInductor's loader has loaded, as the executors of the CPU and of a
// GPU share it. With PyTorch's C++ headers: for the executors alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ikbo/error.h"
#include "ikbo/runtime/model.h"
#include "runtime/executor.h"

namespace ikbo::runtime {

at::ScalarType to_torch(DType dtype);

// The GPU that packages run on: the first that the process sees.
inline c10::Device gpu() { return {c10::DeviceType::CUDA, 0}; }

// Calls into PyTorch; what they throw becomes an ikbo::Error that begins with `context`, unless it
// is one already.
template <typename Call>
auto guarded(const std::string& context, const Call& call) {
  std::string reason;
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  IKBO_CHECK(false, context, ": ", reason);
}

// How the loader lets runs in.
enum class Entry : std::int8_t {
  kPooled,  // as many at once as there are sessions, by instances that wait for events of the GPU
  kSingle,  // one after the other, without events, which a CUDA graph cannot record; what is
            // enqueued runs at once all the same
};

// A loaded program, shared by the executors of all sessions.
class CompiledModel {
 public:
  CompiledModel(const Package& package, const Program& program, int num_sessions, Entry entry);

  const Manifest& manifest() const { return manifest_; }

  // Runs the compiled code, or enqueues it on the thread's current stream, and checks the dtypes of
  // what it returns. Takes the inputs.
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) const;

 private:
  using Loader = torch::inductor::AOTIModelPackageLoader;

  static std::unique_ptr<Loader> load(const Package& package, const std::string& name,
                                      int num_sessions, Entry entry);

  Manifest manifest_;
  Entry entry_;
  std::unique_ptr<Loader> loader_;
  mutable std::mutex single_;
};

// `num_sessions` and `graphs` of the options count.
std::shared_ptr<Executor> make_gpu_executor(const Package& package, const ModelOptions& options,
                                            const Program& program);

}  // namespace ikbo::runtime
