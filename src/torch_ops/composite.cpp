// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/composite.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

#include "torch_ops/aten_calls.h"

namespace ikbo::composite {
namespace {

using ops::call_aten;
using torch::stable::matmul;

// The stable ABI has subtract, with a factor, but no add.
Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

Tensor transposed(const Tensor& t) { return torch::stable::transpose(t, -2, -1); }

Tensor rows(const Tensor& t, int64_t begin, int64_t count) {
  Tensor view = t;
  return torch::stable::narrow(view, 0, begin, count);
}

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

Tensor lce(const Tensor& e_user, const std::vector<Tensor>& e_cand, const Tensor& w_user,
           const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user) {
  Tensor y_user = matmul(w_user, e_user);
  if (bias.has_value()) {
    y_user = add(y_user, torch::stable::reshape(*bias, {bias->size(0), 1}));
  }
  Tensor y_cand;
  int64_t k = 0;
  for (const Tensor& part : e_cand) {
    Tensor w = w_cand;
    const Tensor product = matmul(torch::stable::narrow(w, 1, k, part.size(1)), part);
    y_cand = &part == &e_cand.front() ? product : add(y_cand, product);
    k += part.size(1);
  }
  return add(y_cand, expand(y_user, cand_to_user));
}

int64_t block_size(int64_t num_users, int64_t num_candidates) {
  return std::max<int64_t>({1, num_users, (num_candidates + kMaxBlocks - 1) / kMaxBlocks});
}

Tensor bmm(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user) {
  const int64_t num_candidates = b_cand.size(0);
  const Tensor out = torch::stable::new_empty(
      b_cand, {num_candidates, a_user.size(1), b_cand.size(2)}, b_cand.scalar_type());
  const int64_t block = block_size(a_user.size(0), num_candidates);
  for (int64_t begin = 0; begin < num_candidates; begin += block) {
    const int64_t count = std::min(block, num_candidates - begin);
    const Tensor a = expand(a_user, rows(cand_to_user, begin, count));
    Tensor result = rows(out, begin, count);
    torch::stable::copy_(result, matmul(a, rows(b_cand, begin, count)));
  }
  return out;
}

}  // namespace ikbo::composite
