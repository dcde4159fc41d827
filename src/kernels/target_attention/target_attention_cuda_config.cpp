// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel of target attention runs for which params.
#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>

#include "ikbo/target_attention_cuda.h"
#include "kernels/target_attention/target_attention_layout.h"
#include "kernels/target_attention/target_attention_sm90_launch.h"

namespace ikbo {
namespace {

constexpr std::array<int, 6> kHeadDims = {32, 64, 96, 128, 192, 256};

// 16-byte copies need 16-byte alignment of the base and of every stride but the innermost.
bool is_aligned(const void* data, const std::array<std::int64_t, 4>& stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride[3] == 1 &&
         std::all_of(stride.begin(), stride.begin() + 3, [](std::int64_t s) { return s % 8 == 0; });
}

// The copy engine also needs strides above zero.
bool is_tma_tensor(const void* data, const std::array<std::int64_t, 4>& stride) {
  return is_aligned(data, stride) &&
         std::all_of(stride.begin(), stride.begin() + 3, [](std::int64_t s) { return s > 0; });
}

}  // namespace

std::string to_string(const TargetAttentionCudaConfig& config) {
  if (config.kernel == TargetAttentionKernel::kNone) return "composite";
  std::ostringstream text;
  text << "target_attention_sm90<head_dim=" << config.head_dim << ",key_block=" << config.key_block
       << ">";
  return text.str();
}

TargetAttentionCudaConfig select_target_attention_cuda_config(const TargetAttentionParams& params,
                                                              const DeviceLimits& limits) {
  const bool is_16_bit = params.dtype == DType::kFloat16 || params.dtype == DType::kBFloat16;
  const auto* head_dim =
      std::find_if(kHeadDims.begin(), kHeadDims.end(), [&](int d) { return d >= params.head_dim; });
  const bool fits = limits.compute_capability == 90 && is_16_bit && params.head_dim > 0 &&
                    params.head_dim % 8 == 0 && head_dim != kHeadDims.end() &&
                    params.num_keys > 0 && params.num_users > 0 && params.scale > 0 &&
                    params.user_mask == nullptr && is_aligned(params.q, params.stride_q) &&
                    is_tma_tensor(params.k, params.stride_k) &&
                    is_tma_tensor(params.v, params.stride_v) &&
                    reinterpret_cast<std::uintptr_t>(params.out) % 16 == 0;
  if (!fits) return {};
  return {.kernel = TargetAttentionKernel::kSm90,
          .head_dim = *head_dim,
          .key_block = target_attention_impl::key_block_of(*head_dim)};
}

std::size_t target_attention_workspace_bytes(const TargetAttentionParams& params,
                                             const TargetAttentionCudaConfig& config) {
  if (config.kernel == TargetAttentionKernel::kNone) return 0;
  return target_attention_impl::make_workspace_layout(params).total_bytes;
}

}  // namespace ikbo
