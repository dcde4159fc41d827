// SPDX-License-Identifier: Apache-2.0
// ikbo::linear: schema, checks, registration.
#include <torch/csrc/stable/library.h>

#include "cpu/linear_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"

namespace ikbo::ops {
namespace {

struct LinearArgs {
  const Tensor& x_user;
  const Tensor& x_cand;
  const Tensor& w_user;
  const Tensor& w_cand;
  const std::optional<Tensor>& bias;
  const Tensor& cand_to_user;
};

void check_linear(const LinearArgs& args) {
  constexpr const char* kOp = "linear";
  const Named x_user{"x_user", args.x_user};
  const Named x_cand{"x_cand", args.x_cand};
  const Named w_user{"w_user", args.w_user};
  const Named w_cand{"w_cand", args.w_cand};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  const Named bias{"bias", args.bias.has_value() ? *args.bias : args.x_user};
  check_devices(kOp, {x_user, x_cand, w_user, w_cand, bias, cand_to_user});
  check_float_dtypes(kOp, {x_user, x_cand, w_user, w_cand, bias});
  check_dtype(kOp, cand_to_user, ScalarType::Int);
  check_rank(kOp, x_user, 2, "[U, K_user]");
  check_rank(kOp, x_cand, 2, "[B, K_cand]");
  check_rank(kOp, w_user, 2, "[M, K_user]");
  check_rank(kOp, w_cand, 2, "[M, K_cand]");
  check_rank(kOp, cand_to_user, 1, "[B]");
  const Dim m{"M", args.w_cand.size(0)};
  check_shape(kOp, w_user, {m, {"K_user", args.x_user.size(1)}});
  check_shape(kOp, w_cand, {m, {"K_cand", args.x_cand.size(1)}});
  check_shape(kOp, cand_to_user, {{"B", args.x_cand.size(0)}});
  if (args.bias.has_value()) {
    check_rank(kOp, bias, 1, "[M]");
    check_shape(kOp, bias, {m});
  }
}

Tensor linear_cpu(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
                  const Tensor& w_cand, const std::optional<Tensor>& bias,
                  const Tensor& cand_to_user, const std::string& activation) {
  check_linear({x_user, x_cand, w_user, w_cand, bias, cand_to_user});
  return cpu::linear(x_user, x_cand, w_user, w_cand, bias, cand_to_user,
                     checked_activation("linear", activation));
}

Tensor linear_composite(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
                        const Tensor& w_cand, const std::optional<Tensor>& bias,
                        const Tensor& cand_to_user, const std::string& activation) {
  check_linear({x_user, x_cand, w_user, w_cand, bias, cand_to_user});
  return composite::linear(x_user, x_cand, w_user, w_cand, bias, cand_to_user,
                           checked_activation("linear", activation));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "linear(Tensor x_user, Tensor x_cand, Tensor w_user, Tensor w_cand, Tensor? bias, "
      "Tensor cand_to_user, str activation=\"none\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("linear", TORCH_BOX(&linear_cpu)); }

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("linear", TORCH_BOX(&linear_composite));
}

}  // namespace ikbo::ops
