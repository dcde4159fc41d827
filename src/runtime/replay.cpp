// SPDX-License-Identifier: Apache-2.0
#include "runtime/replay.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <sstream>
#include <utility>

#include "ikbo/error.h"
#include "runtime/ops_library.h"

namespace ikbo::runtime {
namespace {

// Collects the kernel launches during its life.
class TraceScope {
 public:
  TraceScope() { set_kernel_trace(&TraceScope::record, this); }
  ~TraceScope() { set_kernel_trace(nullptr, nullptr); }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  std::vector<KernelRun> runs() const {
    const std::lock_guard lock(mutex_);
    return runs_;
  }

 private:
  static void record(const char* op, const char* kernel, void* user) {
    auto* scope = static_cast<TraceScope*>(user);
    const std::lock_guard lock(scope->mutex_);
    scope->runs_.push_back({op, kernel});
  }

  mutable std::mutex mutex_;
  std::vector<KernelRun> runs_;
};

std::vector<std::vector<std::byte>> read_tensors(const Package& package,
                                                 const std::vector<TensorSpec>& specs,
                                                 const std::vector<std::string>& entries,
                                                 const ReplayCase& replay_case) {
  std::vector<std::vector<std::byte>> tensors;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto rows = static_cast<std::size_t>(
        num_rows(specs[i].role, replay_case.num_users, replay_case.num_candidates));
    const std::size_t bytes = rows * specs[i].row_bytes();
    tensors.push_back(package.read(entries[i], bytes));
    IKBO_CHECK(tensors.back().size() == bytes, package.path(), ": entry ", entries[i],
               " must have ", bytes, " bytes (", rows, " rows of ", specs[i].name, "); got ",
               tensors.back().size());
  }
  return tensors;
}

RunInputs make_inputs(const Manifest& manifest, const ReplayCase& replay_case,
                      const std::vector<std::vector<std::byte>>& tensors) {
  RunInputs inputs{replay_case.num_users, replay_case.num_candidates, {}};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = manifest.inputs[i];
    Shape shape = spec.shape;
    shape[0] = num_rows(spec.role, replay_case.num_users, replay_case.num_candidates);
    inputs.tensors.push_back({spec.dtype, std::move(shape), tensors[i].data(), tensors[i].size()});
  }
  return inputs;
}

void compare_outputs(const Manifest& manifest, const ReplayCase& replay_case,
                     const std::vector<Tensor>& got,
                     const std::vector<std::vector<std::byte>>& want, ReplayResult& result) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const TensorSpec& spec = manifest.outputs[i];
    const Difference difference =
        compare(spec.dtype, {static_cast<const std::byte*>(got[i].data), got[i].bytes}, want[i],
                {replay_case.atol, replay_case.rtol});
    if (i == 0 || difference.share() > result.worst.share()) {
      result.worst = difference;
      result.worst_output = spec.name;
    }
    if (!difference.within()) {
      std::ostringstream text;
      text << "output " << spec.name << " must be within " << difference.allowed << " of "
           << difference.want << " at element " << difference.position << "; got " << difference.got
           << " (error " << difference.error << ")";
      result.failures.push_back(text.str());
    }
  }
}

// Order is the compiler's business; which kernels ran, and how often, is not.
void compare_kernels(std::vector<KernelRun> got, std::vector<KernelRun> want,
                     ReplayResult& result) {
  std::sort(got.begin(), got.end());
  std::sort(want.begin(), want.end());
  std::vector<KernelRun> missing;
  std::vector<KernelRun> unexpected;
  std::set_difference(want.begin(), want.end(), got.begin(), got.end(),
                      std::back_inserter(missing));
  std::set_difference(got.begin(), got.end(), want.begin(), want.end(),
                      std::back_inserter(unexpected));
  for (const KernelRun& run : missing) {
    result.failures.push_back(run.op + " must run kernel " + run.kernel +
                              " as the compilation spec says; it did not");
  }
  for (const KernelRun& run : unexpected) {
    result.failures.push_back(run.op + " ran kernel " + run.kernel +
                              ", which the compilation spec does not name");
  }
}

std::vector<Tensor> run_traced(const Manifest& manifest, Session& session, const RunInputs& inputs,
                               std::vector<KernelRun>& kernels) {
  if (manifest.ops.empty()) {
    return session.run(inputs);
  }
  const TraceScope trace;
  std::vector<Tensor> outputs = session.run(inputs);
  kernels = trace.runs();
  return outputs;
}

}  // namespace

ReplayResult replay(const Package& package, Session& session, const ReplayCase& replay_case) {
  const Manifest& manifest = package.manifest();
  const auto stored = read_tensors(package, manifest.inputs, replay_case.inputs, replay_case);
  const auto want = read_tensors(package, manifest.outputs, replay_case.outputs, replay_case);
  ReplayResult result;
  std::vector<Tensor> outputs;
  std::vector<KernelRun> kernels;
  try {
    outputs = run_traced(manifest, session, make_inputs(manifest, replay_case, stored), kernels);
  } catch (const Error& error) {
    result.failures.emplace_back(error.what());
    return result;
  }
  compare_outputs(manifest, replay_case, outputs, want, result);
  compare_kernels(std::move(kernels), replay_case.kernels, result);
  return result;
}

}  // namespace ikbo::runtime
