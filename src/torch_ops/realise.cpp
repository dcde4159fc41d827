// SPDX-License-Identifier: Apache-2.0
// ikbo::_realise: an identity that a compiler cannot see through, so that a value computed for
// users is computed once for them. Packages call it where ikbo::expand has no lowering of its own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace ikbo::ops {
namespace {

using torch::stable::Tensor;

// An operator's result may not alias its input, hence a copy; it has one row per user.
Tensor realise(const Tensor& x_user) {
  Tensor result = torch::stable::new_empty(x_user, x_user.sizes());
  torch::stable::copy_(result, x_user);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) { m.def("_realise(Tensor x_user) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("_realise", TORCH_BOX(&realise));
}

}  // namespace ikbo::ops
