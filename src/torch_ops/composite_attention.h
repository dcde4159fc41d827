// SPDX-License-Identifier: Apache-2.0
// ikbo::target_attention and its backward out of PyTorch's operators, for every device without a
// kernel of ours. Both work on blocks of candidates (composite::block_size) whose keys and values
// are gathered: they never take more than k and v themselves or 1/64 of the replicated whole. The
// host reads no data. Arguments already checked; index values and lengths are not read by the host.
#pragma once

#include <tuple>

#include "torch_ops/attention_args.h"

namespace ikbo::composite {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> target_attention(const ops::AttentionArgs& args);

struct AttentionGrads {
  const Tensor& out;  // of the gradients that came in
  const Tensor& lse;
};

// `out` and `lse` as the forward gave them. Gradients of k and v are summed in fp32 or better.
std::tuple<Tensor, Tensor, Tensor> target_attention_backward(const ops::AttentionArgs& args,
                                                             const AttentionGrads& grads,
                                                             const Tensor& out, const Tensor& lse);

}  // namespace ikbo::composite
