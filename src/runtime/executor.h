// SPDX-License-Identifier: Apache-2.0
// What runs a model: the AOTInductor loader (executor_aoti.cpp) or a stub (executor_stub.cpp, for
// tests and builds without PyTorch).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ikbo/runtime/model.h"

namespace ikbo::runtime {

class Executor {
 public:
  virtual ~Executor() = default;
  // Inputs were checked against the manifest; there is at least one candidate (none in a run of a
  // user stage) and every tensor is aligned to its element. Called by up to
  // ModelOptions::num_sessions threads at once. Outputs are in the manifest's order and own their
  // storage. Throws ikbo::Error.
  virtual std::vector<Tensor> run(const RunInputs& inputs) = 0;
  // The same loaded model for one session alone, where a session has something of its own (a
  // stream, say); null where all sessions run on this executor.
  virtual std::shared_ptr<Executor> for_session() { return nullptr; }
  // Of the users whose states it keeps; null where it keeps none.
  virtual std::shared_ptr<const UserCacheCounts> user_cache_counts() const { return nullptr; }
};

// A compiled program of a package.
struct Program {
  std::string name;   // of its folder in the archive
  Manifest manifest;  // what it takes and returns
};

// The executor of this build for a program of a package.
std::shared_ptr<Executor> load_executor(const Package& package, const ModelOptions& options,
                                        const Program& program);

// An executor without compiled code; executor_stub.cpp says what it computes.
std::shared_ptr<Executor> make_stub_executor(const Manifest& manifest);

}  // namespace ikbo::runtime
