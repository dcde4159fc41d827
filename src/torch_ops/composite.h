// SPDX-License-Identifier: Apache-2.0
// The operators out of PyTorch's own, for every device without a kernel of ours. User parts are
// computed at U; nothing of size B x K_user or B x S x D is built. Arguments as in the schemas,
// already checked; index values are not read by the host.
#pragma once

#include <optional>

#include "torch_ops/checks.h"

namespace ikbo::composite {

using torch::stable::Tensor;

Tensor expand(const Tensor& x_user, const Tensor& cand_to_user);

Tensor linear(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
              const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user,
              Activation activation);

}  // namespace ikbo::composite
