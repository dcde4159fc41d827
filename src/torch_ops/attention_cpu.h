// SPDX-License-Identifier: Apache-2.0
// The parameters of target attention's kernels, from tensors, and its CPU kernels behind every
// operator that runs them. Arguments have passed check_attention.
#pragma once

#include <tuple>

#include "ikbo/target_attention.h"
#include "torch_ops/attention_args.h"

namespace ikbo::ops {

// Rows are counted in int32, by the kernels and by the plan.
void check_sizes(const AttentionArgs& args);

// Sizes, q, k and v. Of packed histories, num_keys is left 0.
TargetAttentionParams make_params(const AttentionArgs& args);

bool is_empty(const TargetAttentionParams& params);

// Of the log-sum-exp.
ScalarType lse_dtype(const Tensor& q);

// All throw, naming the operator and the place, for values of the index, the lengths and the
// offsets that are out of range.
std::tuple<Tensor, Tensor> run_attention_cpu(const AttentionArgs& args);
// Both at once: no thread waits between them. (first out, second out, first lse, second lse)
std::tuple<Tensor, Tensor, Tensor, Tensor> run_two_attentions_cpu(const AttentionArgs& first,
                                                                  const AttentionArgs& second);
std::tuple<Tensor, Tensor, Tensor> run_attention_backward_cpu(const AttentionArgs& args,
                                                              const AttentionGrads& grads,
                                                              const Tensor& out, const Tensor& lse);

}  // namespace ikbo::ops
