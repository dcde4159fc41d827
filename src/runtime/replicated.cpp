// SPDX-License-Identifier: Apache-2.0
#include "runtime/replicated.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "ikbo/error.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

constexpr std::string_view kIndexName = "cand_to_user";

Tensor repeat_rows(const TensorSpec& spec, const TensorView& users, const TensorView& index,
                   std::int64_t num_candidates) {
  const OwnedTensor repeated = allocate_rows(spec, num_candidates);
  const auto* rows = static_cast<const std::byte*>(users.data);
  const auto* user_of = static_cast<const std::int32_t*>(index.data);
  const std::size_t row_bytes = spec.row_bytes();
  for (std::int64_t b = 0; b < num_candidates; ++b) {
    std::memcpy(repeated.data + static_cast<std::size_t>(b) * row_bytes,
                rows + static_cast<std::size_t>(user_of[b]) * row_bytes, row_bytes);
  }
  return repeated.tensor;
}

class ReplicatingExecutor final : public Executor {
 public:
  ReplicatingExecutor(std::vector<TensorSpec> inputs, std::shared_ptr<Executor> executor)
      : inputs_(std::move(inputs)), executor_(std::move(executor)) {}

  std::shared_ptr<Executor> for_session() override {
    const std::shared_ptr<Executor> own = executor_->for_session();
    return own == nullptr ? nullptr : std::make_shared<ReplicatingExecutor>(inputs_, own);
  }

  std::vector<Tensor> run(const RunInputs& inputs) override {
    const TensorView& index = inputs.tensors.back();
    RunInputs replicated;
    replicated.num_candidates = inputs.num_candidates;
    std::vector<Tensor> storage;
    for (std::size_t i = 0; i + 1 < inputs.tensors.size(); ++i) {
      if (inputs_[i].role == Role::kUser) {
        storage.push_back(repeat_rows(inputs_[i], inputs.tensors[i], index, inputs.num_candidates));
        replicated.tensors.push_back(storage.back().view());
      } else {
        replicated.tensors.push_back(inputs.tensors[i]);
      }
    }
    return executor_->run(replicated);
  }

 private:
  std::vector<TensorSpec> inputs_;  // the index is the last
  std::shared_ptr<Executor> executor_;
};

}  // namespace

Manifest with_user_inputs(const Manifest& manifest, const std::vector<std::string>& names,
                          std::string_view origin) {
  IKBO_CHECK(!manifest.has_users(), origin,
             ": the inputs of a package to be replicated must all have a row for each candidate; "
             "it takes user rows as they are (up to ",
             manifest.max_users, " users)");
  Manifest seen = manifest;
  for (const std::string& name : names) {
    const auto input = std::find_if(seen.inputs.begin(), seen.inputs.end(),
                                    [&](const TensorSpec& spec) { return spec.name == name; });
    IKBO_CHECK(input != seen.inputs.end(), origin,
               ": an input to be replicated must be one of the package's; it has no input ", name);
    input->role = Role::kUser;
  }
  for (const TensorSpec& spec : seen.inputs) {
    IKBO_CHECK(spec.name != kIndexName, origin, ": a package to be replicated must not have an ",
               "input of the index's name, ", kIndexName);
  }
  seen.inputs.push_back({.name = std::string(kIndexName),
                         .dtype = DType::kInt32,
                         .shape = {-1},
                         .role = Role::kIndex,
                         .values = std::nullopt});
  seen.max_users = seen.max_candidates;
  seen.replay.clear();  // of inputs in the package's own form
  return seen;
}

std::shared_ptr<Executor> make_replicating_executor(const Manifest& manifest,
                                                    std::shared_ptr<Executor> executor) {
  return std::make_shared<ReplicatingExecutor>(manifest.inputs, std::move(executor));
}

}  // namespace ikbo::runtime
