// SPDX-License-Identifier: Apache-2.0
// ikbo::expand: schema, checks, registration.
#include <torch/csrc/stable/library.h>

#include "cpu/expand_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"

namespace ikbo::ops {
namespace {

void check_expand(const Tensor& x_user, const Tensor& cand_to_user) {
  constexpr const char* kOp = "expand";
  check_devices(kOp, {{"x_user", x_user}, {"cand_to_user", cand_to_user}});
  check_dtype(kOp, {"cand_to_user", cand_to_user}, ScalarType::Int);
  STD_TORCH_CHECK(x_user.dim() >= 1, "ikbo::expand: x_user must have rank 1 or more, [U, ...]; ",
                  "got rank 0");
  check_rank(kOp, {"cand_to_user", cand_to_user}, 1, "[B]");
}

Tensor expand_cpu(const Tensor& x_user, const Tensor& cand_to_user) {
  check_expand(x_user, cand_to_user);
  return cpu::expand(x_user, cand_to_user);
}

Tensor expand_composite(const Tensor& x_user, const Tensor& cand_to_user) {
  check_expand(x_user, cand_to_user);
  return composite::expand(x_user, cand_to_user);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def("expand(Tensor x_user, Tensor cand_to_user) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("expand", TORCH_BOX(&expand_cpu)); }

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("expand", TORCH_BOX(&expand_composite));
}

}  // namespace ikbo::ops
