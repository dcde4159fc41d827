// SPDX-License-Identifier: Apache-2.0
// The operators out of PyTorch's own, for every device without a kernel of ours. User parts are
// computed at U; nothing of size B x K_user or B x S x D is built. Arguments as in the schemas,
// already checked; index values are not read by the host.
#pragma once

#include <optional>
#include <vector>

#include "torch_ops/checks.h"

namespace ikbo::composite {

using torch::stable::Tensor;

// At most this many blocks per call, or U candidates to a block if that is fewer blocks. Each is
// dozens of launches on a GPU, and takes its share of the replicated tensor.
inline constexpr int64_t kMaxBlocks = 16;

// Candidates per block for operators that gather user data of a block of candidates at a time.
int64_t block_size(int64_t num_users, int64_t num_candidates);

Tensor expand(const Tensor& x_user, const Tensor& cand_to_user);

Tensor linear(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
              const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user,
              Activation activation);

// e_cand has one part at least; they are not joined.
Tensor lce(const Tensor& e_user, const std::vector<Tensor>& e_cand, const Tensor& w_user,
           const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user);

// With both transposes already applied as views. Works on blocks of candidates, so that the
// gathered user matrices never take more than a_user itself or 1/64 of the replicated whole.
Tensor bmm(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user);

}  // namespace ikbo::composite
