// SPDX-License-Identifier: Apache-2.0
// Any PyTorch operator by name through the dispatcher, on whatever device its tensors are.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>

namespace ikbo::ops {

// Calls aten::<name>.<overload> and returns its one tensor. Arguments in schema order, none left
// out; Scalar arguments have no conversion in the stable ABI.
template <typename... Args>
torch::stable::Tensor call_aten(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
}

}  // namespace ikbo::ops
