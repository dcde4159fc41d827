// SPDX-License-Identifier: Apache-2.0
#include "ikbo/runtime/model.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "ikbo/error.h"
#include "runtime/checks.h"
#include "runtime/executor.h"
#include "runtime/replicated.h"
#include "runtime/stages.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

// Compiled code reads its inputs with loads that any element-aligned address satisfies.
bool is_aligned(const TensorView& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.dtype) == 0;
}

// The same inputs, those that are off their element's alignment copied into `copies`.
RunInputs aligned(const RunInputs& inputs, std::vector<Tensor>& copies) {
  RunInputs result = inputs;
  for (TensorView& tensor : result.tensors) {
    if (!is_aligned(tensor)) {
      const std::shared_ptr<std::byte> storage = allocate_bytes(tensor.bytes);
      std::memcpy(storage.get(), tensor.data, tensor.bytes);
      tensor.data = storage.get();
      copies.push_back({tensor.dtype, tensor.shape, storage, tensor.data, tensor.bytes});
    }
  }
  return result;
}

// What users alone determine still has to be computed where there is no candidate: the run is given
// one candidate of zeros, whose results are dropped.
RunInputs with_zero_candidate(const Manifest& manifest, const RunInputs& inputs,
                              std::vector<Tensor>& copies) {
  RunInputs result = inputs;
  result.num_candidates = 1;
  for (std::size_t i = 0; i < result.tensors.size(); ++i) {
    if (manifest.inputs[i].role != Role::kUser) {
      const OwnedTensor zeros = allocate_rows(manifest.inputs[i], 1);
      std::memset(zeros.data, 0, zeros.tensor.bytes);
      result.tensors[i] = zeros.tensor.view();
      copies.push_back(zeros.tensor);
    }
  }
  return result;
}

bool has_user_output(const Manifest& manifest) {
  for (const TensorSpec& spec : manifest.outputs) {
    if (spec.role == Role::kUser) {
      return true;
    }
  }
  return false;
}

std::vector<Tensor> run_without_candidates(const Manifest& manifest, Executor& executor,
                                           const RunInputs& inputs) {
  std::vector<Tensor> outputs(manifest.outputs.size());
  if (has_user_output(manifest)) {
    std::vector<Tensor> copies;
    const RunInputs padded = aligned(with_zero_candidate(manifest, inputs, copies), copies);
    check_inputs(manifest, padded.num_users, padded.num_candidates, padded.tensors,
                 AbsentIndex::kRefused);
    outputs = executor.run(padded);
    check_outputs(manifest, padded.num_users, padded.num_candidates, outputs);
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (manifest.outputs[i].role == Role::kCandidate) {
      outputs[i] = allocate_rows(manifest.outputs[i], 0).tensor;
    }
  }
  return outputs;
}

std::shared_ptr<Executor> load_programs(const Package& package, const ModelOptions& options) {
  const Manifest& manifest = package.manifest();
  if (!manifest.user_stage.has_value()) {
    return load_executor(package, options, {"model", manifest});
  }
  std::shared_ptr<Executor> users =
      load_executor(package, options, {"user_stage", user_stage_of(manifest)});
  std::shared_ptr<Executor> candidates =
      load_executor(package, options, {"candidate_stage", candidate_stage_of(manifest)});
  std::shared_ptr<UserStates> states;
  if (options.user_cache != nullptr) {
    states = std::make_shared<UserStates>(options.user_cache, manifest);
  }
  return make_staged_executor(manifest, std::move(users), std::move(candidates), std::move(states));
}

}  // namespace

Model::Model(Manifest manifest, std::shared_ptr<Executor> executor)
    : manifest_(std::move(manifest)), executor_(std::move(executor)) {}

void check_model_options(const Package& package, const ModelOptions& options) {
  IKBO_CHECK(options.num_sessions >= 1 && options.num_sessions <= kMaxThreads, package.path(),
             ": num_sessions must be from 1 to ", kMaxThreads, "; got ", options.num_sessions);
  IKBO_CHECK(options.threads_per_run >= 0 && options.threads_per_run <= kMaxThreads, package.path(),
             ": threads_per_run must be from 0 to ", kMaxThreads, "; got ",
             options.threads_per_run);
  IKBO_CHECK(options.graphs.max_graphs >= 0, package.path(),
             ": graphs.max_graphs must not be negative; got ", options.graphs.max_graphs);
  if (!options.replicated_inputs.empty()) {
    with_user_inputs(package.manifest(), options.replicated_inputs, package.path());
  }
}

std::shared_ptr<const Model> Model::load(const Package& package, const ModelOptions& options) {
  check_model_options(package, options);
  std::shared_ptr<Executor> executor = load_programs(package, options);
  if (options.replicated_inputs.empty()) {
    return with_executor(package.manifest(), std::move(executor));
  }
  const Manifest manifest =
      with_user_inputs(package.manifest(), options.replicated_inputs, package.path());
  return with_executor(manifest, make_replicating_executor(manifest, std::move(executor)));
}

std::shared_ptr<const Model> Model::with_executor(Manifest manifest,
                                                  std::shared_ptr<Executor> executor) {
  return std::shared_ptr<const Model>(new Model(std::move(manifest), std::move(executor)));
}

std::shared_ptr<const UserCacheCounts> Model::user_cache_counts() const {
  return executor_->user_cache_counts();
}

Session::Session(std::shared_ptr<const Model> model)
    : model_(std::move(model)), executor_(model_->executor_->for_session()) {
  if (executor_ == nullptr) {
    executor_ = model_->executor_;
  }
}

std::vector<Tensor> Session::run(const RunInputs& inputs) {
  const Manifest& manifest = model_->manifest_;
  check_inputs(manifest, inputs.num_users, inputs.num_candidates, inputs.tensors,
               AbsentIndex::kRefused);
  if (inputs.num_candidates == 0) {
    return run_without_candidates(manifest, *executor_, inputs);
  }
  std::vector<Tensor> copies;
  std::vector<Tensor> outputs = executor_->run(aligned(inputs, copies));
  check_outputs(manifest, inputs.num_users, inputs.num_candidates, outputs);
  return outputs;
}

}  // namespace ikbo::runtime
