// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace ikbo::runtime {

// The schema that PyTorch's dispatcher has for an operator ("ikbo::lce.list"), if it has any.
std::optional<std::string> registered_schema(const std::string& op);

}  // namespace ikbo::runtime
