// SPDX-License-Identifier: Apache-2.0
// ikbo::bmm: schema, checks, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/bmm_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"

namespace ikbo::ops {
namespace {

Tensor oriented(const Tensor& t, bool is_transposed) {
  return is_transposed ? torch::stable::transpose(t, 1, 2) : t;
}

// a and b already oriented: a [U, P, R], b [B, R, N].
void check_bmm_shapes(const Tensor& a, const Tensor& b, const Tensor& cand_to_user) {
  constexpr const char* kOp = "bmm";
  STD_TORCH_CHECK(a.size(2) == b.size(1), "ikbo::bmm: b_cand must have R = ", a.size(2),
                  " rows per candidate (= the columns of a_user, after the transposes asked for); "
                  "got ",
                  b.size(1));
  check_shape(kOp, {"cand_to_user", cand_to_user}, {{"B", b.size(0)}});
}

void check_bmm(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user) {
  constexpr const char* kOp = "bmm";
  const Named a{"a_user", a_user};
  const Named b{"b_cand", b_cand};
  const Named index{"cand_to_user", cand_to_user};
  check_devices(kOp, {a, b, index});
  check_float_dtypes(kOp, {a, b});
  check_dtype(kOp, index, ScalarType::Int);
  check_rank(kOp, a, 3, "[U, P, R]");
  check_rank(kOp, b, 3, "[B, R, N]");
  check_rank(kOp, index, 1, "[B]");
}

Tensor bmm_cpu(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user,
               bool transpose_a, bool transpose_b) {
  check_bmm(a_user, b_cand, cand_to_user);
  const Tensor a = oriented(a_user, transpose_a);
  const Tensor b = oriented(b_cand, transpose_b);
  check_bmm_shapes(a, b, cand_to_user);
  return cpu::bmm(a, b, cand_to_user);
}

Tensor bmm_composite(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user,
                     bool transpose_a, bool transpose_b) {
  check_bmm(a_user, b_cand, cand_to_user);
  const Tensor a = oriented(a_user, transpose_a);
  const Tensor b = oriented(b_cand, transpose_b);
  check_bmm_shapes(a, b, cand_to_user);
  return composite::bmm(a, b, cand_to_user);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "bmm(Tensor a_user, Tensor b_cand, Tensor cand_to_user, bool transpose_a=False, "
      "bool transpose_b=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("bmm", TORCH_BOX(&bmm_cpu)); }

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("bmm", TORCH_BOX(&bmm_composite));
}

}  // namespace ikbo::ops
