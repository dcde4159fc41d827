// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel of self_target_attention runs for which params.
#include <sstream>

#include "kernels/target_attention/self_target_attention_layout.h"

namespace ikbo {

std::string to_string(const SelfTargetAttentionCudaConfig& config) {
  if (config.kernel == SelfTargetAttentionKernel::kNone) return "composite";
  std::ostringstream text;
  text << "self_target_attention_sm90<head_dim=" << config.head_dim
       << ",key_block=" << config.key_block << ">";
  return text.str();
}

SelfTargetAttentionCudaConfig select_self_target_attention_cuda_config(
    const SelfTargetAttentionParams& params, const DeviceLimits& limits) {
  if (params.cand.user_offsets != nullptr) return {};
  const TargetAttentionCudaConfig cand = select_target_attention_cuda_config(params.cand, limits);
  const TargetAttentionCudaConfig own =
      select_target_attention_cuda_config(target_attention_impl::own_part(params), limits);
  if (cand.kernel != TargetAttentionKernel::kSm90 || own.kernel != TargetAttentionKernel::kSm90) {
    return {};
  }
  return {.kernel = SelfTargetAttentionKernel::kSm90,
          .head_dim = own.head_dim,
          .key_block = own.key_block};
}

std::size_t self_target_attention_workspace_bytes(const SelfTargetAttentionParams& params,
                                                  const SelfTargetAttentionCudaConfig& config) {
  if (config.kernel == SelfTargetAttentionKernel::kNone) return 0;
  return target_attention_impl::make_workspace_layout(params, config).total_bytes;
}

}  // namespace ikbo
