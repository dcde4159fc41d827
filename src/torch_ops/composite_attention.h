// SPDX-License-Identifier: Apache-2.0
// ikbo::target_attention and its backward out of PyTorch's operators, for every device without a
// kernel of ours. Both work on blocks of candidates (composite::block_size) whose keys and values
// are gathered: they never take more than k and v themselves or 1/64 of the replicated whole.
// Arguments already checked. The host reads no data but the offsets of packed histories: it has to
// know the longest of them, and checks them.
#pragma once

#include <tuple>

#include "torch_ops/attention_args.h"

namespace ikbo::composite {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> target_attention(const ops::AttentionArgs& args);

// Gradients of k and v, summed in fp32 or better over the calls that have both.
struct KeyGrads {
  explicit KeyGrads(const ops::AttentionArgs& args);

  // In the sizes and the dtype of k and v.
  std::tuple<Tensor, Tensor> finished(const ops::AttentionArgs& args) const;

  Tensor k;
  Tensor v;
};

// `out` and `lse` as the forward gave them. Adds to `sums`, returns the gradient of q.
Tensor add_gradients(const ops::AttentionArgs& args, const ops::AttentionGrads& grads,
                     const Tensor& out, const Tensor& lse, KeyGrads& sums);

std::tuple<Tensor, Tensor, Tensor> target_attention_backward(const ops::AttentionArgs& args,
                                                             const ops::AttentionGrads& grads,
                                                             const Tensor& out, const Tensor& lse);

}  // namespace ikbo::composite
