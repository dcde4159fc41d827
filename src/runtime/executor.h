// SPDX-License-Identifier: Apache-2.0
// What runs a model: the AOTInductor loader (executor_aoti.cpp) or a stub (executor_stub.cpp, for
// tests and builds without PyTorch).
#pragma once

#include <memory>
#include <vector>

#include "ikbo/runtime/model.h"

namespace ikbo::runtime {

class Executor {
 public:
  virtual ~Executor() = default;
  // Inputs were checked against the manifest; there is at least one candidate and every tensor is
  // aligned to its element. Called by up to ModelOptions::num_sessions threads at once. Outputs are
  // in the manifest's order and own their storage. Throws ikbo::Error.
  virtual std::vector<Tensor> run(const RunInputs& inputs) = 0;
  // The same loaded model for one session alone, where a session has something of its own (a
  // stream, say); null where all sessions run on this executor.
  virtual std::shared_ptr<Executor> for_session() { return nullptr; }
};

// The executor of this build for a package.
std::shared_ptr<Executor> load_executor(const Package& package, const ModelOptions& options);

// An executor without compiled code; executor_stub.cpp says what it computes.
std::shared_ptr<Executor> make_stub_executor(const Manifest& manifest);

}  // namespace ikbo::runtime
