// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ikbo/error.h"
#include "runtime/checks.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

bool is_passed(const Manifest& manifest, const TensorSpec& input) {
  const std::vector<std::string>& passed = manifest.user_stage->passed;
  return input.role != Role::kUser ||
         std::find(passed.begin(), passed.end(), input.name) != passed.end();
}

// Where the rows of a user's state stand in one block of memory.
class StateLayout {
 public:
  explicit StateLayout(const std::vector<TensorSpec>& specs) : specs_(specs) {
    offsets_.reserve(specs_.size());
    for (const TensorSpec& spec : specs_) {
      offsets_.push_back(bytes_);
      bytes_ += (spec.row_bytes() + kStorageAlignment - 1) / kStorageAlignment * kStorageAlignment;
    }
  }

  std::size_t bytes() const { return bytes_; }

  // A user's rows of `tensors`, copied.
  UserStates::State take(const std::vector<Tensor>& tensors, std::int64_t user) const {
    const std::shared_ptr<std::byte> block = allocate_bytes(bytes_);
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      const std::size_t row = specs_[i].row_bytes();
      copy(block.get() + offsets_[i],
           static_cast<const std::byte*>(tensors[i].data) + static_cast<std::size_t>(user) * row,
           row);
    }
    return block;
  }

  // Tensors of the states of several users, copied; those of one user are where they lie.
  std::vector<Tensor> join(const std::vector<UserStates::State>& states) const {
    std::vector<Tensor> tensors;
    tensors.reserve(specs_.size());
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      const std::size_t row = specs_[i].row_bytes();
      if (states.size() == 1) {
        Shape shape = specs_[i].shape;
        shape[0] = 1;
        const std::byte* data = states[0].get() + offsets_[i];
        tensors.push_back({specs_[i].dtype, std::move(shape), states[0], data, row});
        continue;
      }
      const OwnedTensor joined = allocate_rows(specs_[i], static_cast<std::int64_t>(states.size()));
      for (std::size_t user = 0; user < states.size(); ++user) {
        copy(joined.data + user * row, states[user].get() + offsets_[i], row);
      }
      tensors.push_back(joined.tensor);
    }
    return tensors;
  }

 private:
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes > 0) {
      std::memcpy(to, from, bytes);
    }
  }

  std::vector<TensorSpec> specs_;
  std::vector<std::size_t> offsets_;  // of each tensor's row
  std::size_t bytes_ = 0;
};

// What the executors of all sessions share.
struct StagedModel {
  explicit StagedModel(const Manifest& manifest)
      : user_stage(user_stage_of(manifest)), layout(user_stage.outputs) {
    for (std::size_t i = 0; i < manifest.inputs.size(); ++i) {
      if (manifest.inputs[i].role == Role::kUser) {
        user_inputs.push_back(i);
      }
      if (is_passed(manifest, manifest.inputs[i])) {
        passed_inputs.push_back(i);
      }
    }
  }

  Manifest user_stage;
  StateLayout layout;
  std::vector<std::size_t> user_inputs;    // those of the user stage, by place
  std::vector<std::size_t> passed_inputs;  // those of the candidate stage
};

RunInputs inputs_of(const std::vector<std::size_t>& places, const RunInputs& inputs) {
  RunInputs picked;
  picked.num_users = inputs.num_users;
  picked.tensors.reserve(places.size());
  for (const std::size_t place : places) {
    picked.tensors.push_back(inputs.tensors[place]);
  }
  return picked;
}

class StagedExecutor final : public Executor {
 public:
  StagedExecutor(std::shared_ptr<const StagedModel> model, std::shared_ptr<Executor> user_stage,
                 std::shared_ptr<Executor> candidate_stage, std::shared_ptr<UserStates> states)
      : model_(std::move(model)),
        user_stage_(std::move(user_stage)),
        candidate_stage_(std::move(candidate_stage)),
        states_(std::move(states)) {}

  std::shared_ptr<Executor> for_session() override {
    const std::shared_ptr<Executor> users = user_stage_->for_session();
    const std::shared_ptr<Executor> candidates = candidate_stage_->for_session();
    if (users == nullptr && candidates == nullptr) {
      return nullptr;
    }
    return std::make_shared<StagedExecutor>(model_, users == nullptr ? user_stage_ : users,
                                            candidates == nullptr ? candidate_stage_ : candidates,
                                            states_);
  }

  std::shared_ptr<const UserCacheCounts> user_cache_counts() const override {
    return states_ == nullptr ? nullptr : states_->counts();
  }

  std::vector<Tensor> run(const RunInputs& inputs) override {
    const RunInputs users = inputs_of(model_->user_inputs, inputs);
    const bool is_cached = states_ != nullptr && !inputs.bypasses_user_cache;
    const std::vector<Tensor> state =
        is_cached ? known_state(users, inputs.user_keys) : compute(users);
    RunInputs candidates = inputs_of(model_->passed_inputs, inputs);
    candidates.num_candidates = inputs.num_candidates;
    for (const Tensor& tensor : state) {
      candidates.tensors.push_back(tensor.view());
    }
    return candidate_stage_->run(candidates);
  }

 private:
  std::vector<Tensor> compute(const RunInputs& users) {
    std::vector<Tensor> state = user_stage_->run(users);
    check_outputs(model_->user_stage, users.num_users, 0, state);
    return state;
  }

  std::vector<Tensor> known_state(const RunInputs& users, const std::vector<std::string>& keys) {
    const std::vector<UserId> ids = identify(users, keys);
    std::vector<UserStates::State> states;
    states.reserve(ids.size());
    std::vector<std::size_t> missing;
    for (std::size_t user = 0; user < ids.size(); ++user) {
      states.push_back(states_->find(ids[user]));
      if (states.back() == nullptr) {
        missing.push_back(user);
      }
    }
    if (missing.empty()) {
      return model_->layout.join(states);
    }
    std::vector<Tensor> computed =
        missing.size() == ids.size() ? compute(users) : compute_rows(users, missing);
    for (std::size_t row = 0; row < missing.size(); ++row) {
      UserStates::State state = model_->layout.take(computed, static_cast<std::int64_t>(row));
      states[missing[row]] = state;
      states_->insert(ids[missing[row]], std::move(state), model_->layout.bytes());
    }
    return missing.size() == ids.size() ? std::move(computed) : model_->layout.join(states);
  }

  std::vector<UserId> identify(const RunInputs& users, const std::vector<std::string>& keys) {
    ContentHasher hasher(states_->secret());
    std::vector<UserId> ids;
    ids.reserve(static_cast<std::size_t>(users.num_users));
    for (std::int64_t user = 0; user < users.num_users; ++user) {
      hasher.begin();
      for (std::size_t i = 0; i < users.tensors.size(); ++i) {
        const std::size_t row = model_->user_stage.inputs[i].row_bytes();
        hasher.add(row_of(users.tensors[i], user, row), row);
      }
      const auto at = static_cast<std::size_t>(user);
      ids.push_back({at < keys.size() ? std::string_view(keys[at]) : "", hasher.finish()});
    }
    return ids;
  }

  std::vector<Tensor> compute_rows(const RunInputs& users, const std::vector<std::size_t>& rows) {
    RunInputs some;
    some.num_users = static_cast<std::int64_t>(rows.size());
    std::vector<Tensor> storage;
    storage.reserve(users.tensors.size());
    for (std::size_t i = 0; i < users.tensors.size(); ++i) {
      const TensorSpec& spec = model_->user_stage.inputs[i];
      const OwnedTensor gathered = allocate_rows(spec, some.num_users);
      const std::size_t row = spec.row_bytes();
      for (std::size_t r = 0; row > 0 && r < rows.size(); ++r) {
        std::memcpy(gathered.data + r * row,
                    row_of(users.tensors[i], static_cast<std::int64_t>(rows[r]), row), row);
      }
      storage.push_back(gathered.tensor);
      some.tensors.push_back(gathered.tensor.view());
    }
    return compute(some);
  }

  static const std::byte* row_of(const TensorView& tensor, std::int64_t row, std::size_t bytes) {
    return static_cast<const std::byte*>(tensor.data) + static_cast<std::size_t>(row) * bytes;
  }

  std::shared_ptr<const StagedModel> model_;
  std::shared_ptr<Executor> user_stage_;
  std::shared_ptr<Executor> candidate_stage_;
  std::shared_ptr<UserStates> states_;  // null: no cache
};

}  // namespace

Manifest user_stage_of(const Manifest& manifest) {
  Manifest stage = manifest;
  stage.user_stage.reset();
  std::erase_if(stage.inputs, [](const TensorSpec& input) { return input.role != Role::kUser; });
  stage.outputs = manifest.user_stage->state;
  return stage;
}

Manifest candidate_stage_of(const Manifest& manifest) {
  Manifest stage = manifest;
  stage.user_stage.reset();
  std::erase_if(stage.inputs, [&](const TensorSpec& input) { return !is_passed(manifest, input); });
  const std::vector<TensorSpec>& state = manifest.user_stage->state;
  stage.inputs.insert(stage.inputs.end(), state.begin(), state.end());
  return stage;
}

std::shared_ptr<Executor> make_staged_executor(const Manifest& manifest,
                                               std::shared_ptr<Executor> user_stage,
                                               std::shared_ptr<Executor> candidate_stage,
                                               std::shared_ptr<UserStates> states) {
  return std::make_shared<StagedExecutor>(std::make_shared<StagedModel>(manifest),
                                          std::move(user_stage), std::move(candidate_stage),
                                          std::move(states));
}

}  // namespace ikbo::runtime
