// SPDX-License-Identifier: Apache-2.0
// A package compiled without the index, served to clients that send it all the same: user rows are
// repeated for every candidate before the run.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/manifest.h"
#include "runtime/executor.h"

namespace ikbo::runtime {

// `manifest` as clients see it: the inputs of those names are user inputs, and `cand_to_user` is
// the last one. A run may have as many users as candidates. Throws ikbo::Error that begins with
// `origin` for a package with users of its own and for names that are no inputs of it.
Manifest with_user_inputs(const Manifest& manifest, const std::vector<std::string>& names,
                          std::string_view origin);

// Takes inputs of `manifest`, which with_user_inputs returned, and runs `executor` on them with
// every user row repeated for its candidates.
std::shared_ptr<Executor> make_replicating_executor(const Manifest& manifest,
                                                    std::shared_ptr<Executor> executor);

}  // namespace ikbo::runtime
