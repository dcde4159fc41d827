// SPDX-License-Identifier: Apache-2.0
// What runs a model: the AOTInductor loader (executor_aoti.cpp) or a stub (tests, sanitizers).
#pragma once

#include <vector>

#include "ikbo/runtime/model.h"

namespace ikbo::runtime {

class Executor {
 public:
  virtual ~Executor() = default;
  // Inputs were checked against the manifest. Thread-safe up to ModelOptions::num_sessions callers.
  virtual std::vector<Tensor> run(const RunInputs& inputs) = 0;
};

}  // namespace ikbo::runtime
