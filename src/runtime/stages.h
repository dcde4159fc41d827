// SPDX-License-Identifier: Apache-2.0
// A package in two stages (manifest field user_stage):
//
//   user inputs --> user stage --> state --+--> candidate stage --> outputs
//                                          |
//   the other inputs, and passed ones -----+
//
// With a cache, the user stage runs for the users alone whose state is not in it; the candidate
// stage does not know where its rows come from.
#pragma once

#include <memory>

#include "ikbo/runtime/manifest.h"
#include "runtime/executor.h"
#include "runtime/user_state_cache.h"

namespace ikbo::runtime {

// What each stage of a package with stages takes and returns, as packages of one program say it.
Manifest user_stage_of(const Manifest& manifest);
Manifest candidate_stage_of(const Manifest& manifest);

// Runs a package of that manifest by the executors of its stages; `states` may be null: no cache.
std::shared_ptr<Executor> make_staged_executor(const Manifest& manifest,
                                               std::shared_ptr<Executor> user_stage,
                                               std::shared_ptr<Executor> candidate_stage,
                                               std::shared_ptr<UserStates> states);

}  // namespace ikbo::runtime
