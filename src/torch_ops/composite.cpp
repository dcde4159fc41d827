// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/composite.h"

#include <torch/csrc/stable/ops.h>

#include <string>

#include "torch_ops/aten_calls.h"

namespace ikbo::composite {
namespace {

using ops::call_aten;
using torch::stable::matmul;

// The stable ABI has subtract, with a factor, but no add.
Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

Tensor transposed(const Tensor& t) { return torch::stable::transpose(t, -2, -1); }

Tensor activated(const Tensor& t, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return t;
    case Activation::kRelu:
      return call_aten("aten::relu", "", t);
    case Activation::kGelu:
      return call_aten("aten::gelu", "", t, std::string("none"));
    case Activation::kSilu:
      return call_aten("aten::silu", "", t);
    case Activation::kSigmoid:
      return call_aten("aten::sigmoid", "", t);
  }
  return t;
}

}  // namespace

Tensor expand(const Tensor& x_user, const Tensor& cand_to_user) {
  return call_aten("aten::index_select", "", x_user, int64_t{0}, cand_to_user);
}

Tensor linear(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
              const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user,
              Activation activation) {
  Tensor y_user = matmul(x_user, transposed(w_user));
  if (bias.has_value()) {
    y_user = add(y_user, *bias);
  }
  const Tensor y_cand = matmul(x_cand, transposed(w_cand));
  return activated(add(y_cand, expand(y_user, cand_to_user)), activation);
}

}  // namespace ikbo::composite
