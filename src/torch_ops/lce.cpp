// SPDX-License-Identifier: Apache-2.0
// ikbo::lce: schema, checks, registration.
#include <torch/csrc/stable/library.h>

#include "cpu/lce_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"

namespace ikbo::ops {
namespace {

struct LceArgs {
  const Tensor& e_user;
  const Tensor& e_cand;
  const Tensor& w_user;
  const Tensor& w_cand;
  const std::optional<Tensor>& bias;
  const Tensor& cand_to_user;
};

void check_lce(const LceArgs& args) {
  constexpr const char* kOp = "lce";
  const Named e_user{"e_user", args.e_user};
  const Named e_cand{"e_cand", args.e_cand};
  const Named w_user{"w_user", args.w_user};
  const Named w_cand{"w_cand", args.w_cand};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  const Named bias{"bias", args.bias.has_value() ? *args.bias : args.e_user};
  check_devices(kOp, {e_user, e_cand, w_user, w_cand, bias, cand_to_user});
  check_float_dtypes(kOp, {e_user, e_cand, w_user, w_cand, bias});
  check_dtype(kOp, cand_to_user, ScalarType::Int);
  check_rank(kOp, e_user, 3, "[U, K_user, N]");
  check_rank(kOp, e_cand, 3, "[B, K_cand, N]");
  check_rank(kOp, w_user, 2, "[M, K_user]");
  check_rank(kOp, w_cand, 2, "[M, K_cand]");
  check_rank(kOp, cand_to_user, 1, "[B]");
  const Dim m{"M", args.w_cand.size(0)};
  const Dim n{"N", args.e_cand.size(2)};
  check_shape(kOp, e_user, {{"U", args.e_user.size(0)}, {"K_user", args.e_user.size(1)}, n});
  check_shape(kOp, w_user, {m, {"K_user", args.e_user.size(1)}});
  check_shape(kOp, w_cand, {m, {"K_cand", args.e_cand.size(1)}});
  check_shape(kOp, cand_to_user, {{"B", args.e_cand.size(0)}});
  if (args.bias.has_value()) {
    check_rank(kOp, bias, 1, "[M]");
    check_shape(kOp, bias, {m});
  }
}

Tensor lce_cpu(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user,
               const Tensor& w_cand, const std::optional<Tensor>& bias,
               const Tensor& cand_to_user) {
  check_lce({e_user, e_cand, w_user, w_cand, bias, cand_to_user});
  return cpu::lce(e_user, e_cand, w_user, w_cand, bias, cand_to_user);
}

Tensor lce_composite(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user,
                     const Tensor& w_cand, const std::optional<Tensor>& bias,
                     const Tensor& cand_to_user) {
  check_lce({e_user, e_cand, w_user, w_cand, bias, cand_to_user});
  return composite::lce(e_user, e_cand, w_user, w_cand, bias, cand_to_user);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "lce(Tensor e_user, Tensor e_cand, Tensor w_user, Tensor w_cand, Tensor? bias, "
      "Tensor cand_to_user) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("lce", TORCH_BOX(&lce_cpu)); }

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("lce", TORCH_BOX(&lce_composite));
}

}  // namespace ikbo::ops
