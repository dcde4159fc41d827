// SPDX-License-Identifier: Apache-2.0
// The backward of ikbo::target_attention on CUDA. What no kernel takes goes to the composite.
#include "ikbo/target_attention_backward_cuda.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <tuple>

#include "common/kernel_trace.h"
#include "torch_ops/aten_calls.h"
#include "torch_ops/attention_args.h"
#include "torch_ops/attention_cpu.h"
#include "torch_ops/composite_attention.h"
#include "torch_ops/cuda_context.h"

namespace ikbo::ops {
namespace {

using torch::stable::contiguous;

// Contiguous, at a multiple of 16 bytes.
Tensor aligned(const Tensor& t) {
  Tensor dense = contiguous(t);
  if (reinterpret_cast<std::uintptr_t>(dense.const_data_ptr()) % 16 == 0) return dense;
  Tensor copy = torch::stable::new_empty(dense, dense.sizes());
  torch::stable::copy_(copy, dense);
  return copy;
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const Tensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& cand_to_user, const std::optional<Tensor>& user_lengths,
    const std::optional<Tensor>& cand_lengths, const std::optional<Tensor>& user_mask,
    const std::optional<double>& scale, const Tensor& out, const Tensor& lse) {
  const AttentionArgs args{q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale};
  check_attention(args);
  check_sizes(args);
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  TargetAttentionParams params = make_params(args);
  const TargetAttentionBackwardConfig config =
      user_mask ? TargetAttentionBackwardConfig{}
                : select_target_attention_backward_config(params, query_device_limits(device));
  trace_kernel("_target_attention_backward", config);
  if (config.head_dim == 0) {
    return composite::target_attention_backward(args, {grad_out, grad_lse}, out, lse);
  }
  const Tensor index = contiguous(cand_to_user);
  // Stable: sums over a user's candidates run in the order of the batch.
  const Tensor order =
      call_aten("aten::argsort", "stable", index, /*stable=*/true, int64_t{0}, false);
  const Tensor inputs[] = {aligned(q), aligned(k), aligned(v), aligned(out)};
  const Tensor rows[] = {contiguous(lse), aligned(grad_out), contiguous(grad_lse)};
  std::optional<Tensor> lengths[2];
  if (user_lengths) lengths[0] = contiguous(*user_lengths);
  if (cand_lengths) lengths[1] = contiguous(*cand_lengths);
  const auto ints = [](const std::optional<Tensor>& tensor) {
    return tensor ? static_cast<const int32_t*>(tensor->const_data_ptr()) : nullptr;
  };
  params.q = inputs[0].const_data_ptr();
  params.k = inputs[1].const_data_ptr();
  params.v = inputs[2].const_data_ptr();
  params.out = const_cast<void*>(inputs[3].const_data_ptr());
  params.lse = const_cast<void*>(rows[0].const_data_ptr());
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  params.user_lengths = ints(lengths[0]);
  params.cand_lengths = ints(lengths[1]);
  std::tuple<Tensor, Tensor, Tensor> grads{torch::stable::new_empty(q, q.sizes()),
                                           torch::stable::new_empty(k, k.sizes()),
                                           torch::stable::new_empty(v, v.sizes())};
  const Tensor workspace = torch::stable::new_empty(
      q, {static_cast<int64_t>(target_attention_backward_workspace_bytes(params))},
      ScalarType::Byte);
  target_attention_backward({.forward = params,
                             .grad_out = rows[1].const_data_ptr(),
                             .grad_lse = rows[2].const_data_ptr(),
                             .grad_q = std::get<0>(grads).mutable_data_ptr(),
                             .grad_k = std::get<1>(grads).mutable_data_ptr(),
                             .grad_v = std::get<2>(grads).mutable_data_ptr()},
                            config, static_cast<const int64_t*>(order.const_data_ptr()),
                            workspace.mutable_data_ptr(), current_cuda_stream(device));
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("_target_attention_backward", TORCH_BOX(&backward));
}

}  // namespace ikbo::ops
