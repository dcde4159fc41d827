// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/self_attention_cuda.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/kernel_trace.h"
#include "ikbo/self_target_attention_cuda.h"
#include "torch_ops/attention_cpu.h"
#include "torch_ops/cuda_context.h"

namespace ikbo::ops {

std::optional<SelfResults> run_self_attention_cuda(const SelfArgs& args) {
  const AttentionArgs cand = cand_part(args);
  check_sizes(cand);
  const int32_t device = args.q_user.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  SelfTargetAttentionParams params{.cand = make_params(cand),
                                   .q_user = args.q_user.const_data_ptr(),
                                   .is_causal = args.is_causal};
  std::copy_n(args.q_user.strides().begin(), 4, params.stride_q_user.begin());
  const DeviceLimits limits = query_device_limits(device);
  const SelfTargetAttentionCudaConfig config =
      select_self_target_attention_cuda_config(params, limits);
  if (config.kernel == SelfTargetAttentionKernel::kNone) return std::nullopt;

  const auto new_lse = [](const Tensor& q) {
    return torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  };
  SelfResults results{torch::stable::new_empty(args.q_user, args.q_user.sizes()),
                      torch::stable::new_empty(args.q_cand, args.q_cand.sizes()),
                      new_lse(args.q_user), new_lse(args.q_cand)};
  auto& [out_user, out_cand, lse_user, lse_cand] = results;
  if (params.cand.num_heads == 0) return results;
  std::optional<Tensor> index;
  std::optional<Tensor> user_lengths;
  std::optional<Tensor> cand_lengths;
  params.cand.cand_to_user = list_data(args.cand_to_user, index);
  params.cand.user_lengths = list_data(args.user_lengths, user_lengths);
  params.cand.cand_lengths = list_data(args.cand_lengths, cand_lengths);
  params.cand.out = out_cand.mutable_data_ptr();
  params.cand.lse = lse_cand.mutable_data_ptr();
  params.out_user = out_user.mutable_data_ptr();
  params.lse_user = lse_user.mutable_data_ptr();
  const Tensor workspace = torch::stable::new_empty(
      args.q_user, {static_cast<int64_t>(self_target_attention_workspace_bytes(params, config))},
      ScalarType::Byte);
  trace_kernel(kSelfOp, config);
  self_target_attention(params, config, limits, workspace.mutable_data_ptr(),
                        current_cuda_stream(device));
  return results;
}

}  // namespace ikbo::ops
