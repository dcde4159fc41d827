// SPDX-License-Identifier: Apache-2.0
// With executor_aoti.cpp, the runtime's use of PyTorch's C++ headers.
#include "runtime/registered_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace ikbo::runtime {

std::optional<std::string> registered_schema(const std::string& op) {
  const std::size_t dot = op.find('.');
  const c10::OperatorName name(op.substr(0, dot),
                               dot == std::string::npos ? "" : op.substr(dot + 1));
  const std::optional<c10::OperatorHandle> handle = c10::Dispatcher::singleton().findSchema(name);
  return handle.has_value() ? std::optional(c10::toString(handle->schema())) : std::nullopt;
}

}  // namespace ikbo::runtime
