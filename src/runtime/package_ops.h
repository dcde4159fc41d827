// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ikbo/runtime/model.h"

namespace ikbo::runtime {

// Loads the operator library, where the package calls ikbo operators, and throws ikbo::Error naming
// the package unless each has the schema that the package was compiled against.
void check_ops(const Package& package, const std::string& ops_library);

}  // namespace ikbo::runtime
