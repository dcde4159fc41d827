// SPDX-License-Identifier: Apache-2.0
// Replays the cases that a package stores: the same inputs must give the stored outputs, by the
// kernels that the compilation spec names.
#pragma once

#include <string>
#include <vector>

#include "ikbo/runtime/model.h"
#include "runtime/compare.h"

namespace ikbo::runtime {

struct ReplayResult {
  std::string worst_output;  // the output that `worst` is of
  Difference worst;
  std::vector<std::string> failures;  // one sentence each; empty when the case passed

  bool passed() const { return failures.empty(); }
};

// Runs one case. A run that throws is a failure of the case, not an exception; an unreadable
// package throws ikbo::Error. The kernel trace is process-wide: one replay at a time.
ReplayResult replay(const Package& package, Session& session, const ReplayCase& replay_case);

}  // namespace ikbo::runtime
