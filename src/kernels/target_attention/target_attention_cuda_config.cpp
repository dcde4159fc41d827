// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel of target attention runs for which params.
#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>

#include "ikbo/target_attention_cuda.h"
#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo {
namespace {

constexpr std::array<int, 6> kHeadDims = {32, 64, 96, 128, 192, 256};

// 16-byte copies need 16-byte alignment of the base and of every stride but the innermost.
bool is_aligned(const void* data, const std::array<std::int64_t, 4>& stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride[3] == 1 &&
         std::all_of(stride.begin(), stride.begin() + 3, [](std::int64_t s) { return s % 8 == 0; });
}

// Of keys or values. The copy engine also needs strides above zero.
bool is_tma_history(const void* data, std::array<std::int64_t, 4> stride, bool is_packed) {
  if (is_packed) stride[0] = stride[1];  // of the one history that there is
  return is_aligned(data, stride) &&
         std::all_of(stride.begin(), stride.begin() + 3, [](std::int64_t s) { return s > 0; });
}

// Blocks of keys that a CTA must be spared for a merge to pay.
constexpr std::int64_t kLeastBlocksSpared = 8;

// Into how many ranges a user's keys are split, so that every SM has some. Lengths are on the
// device: all are taken for S. Of packed histories nothing is known.
int splits_of(const TargetAttentionParams& p, int head_dim, const DeviceLimits& limits) {
  const auto ceil_divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t rows = target_attention_impl::rows_of_candidate(p) * p.num_candidates;
  const std::int64_t tiles =
      std::max<std::int64_t>(ceil_divide(rows, target_attention_impl::tile_rows_of(head_dim)),
                             std::min(p.num_users, p.num_candidates)) *
      p.num_kv_heads;
  const std::int64_t blocks =
      ceil_divide(p.num_keys, target_attention_impl::key_block_of(head_dim));
  const std::int64_t most = std::min<std::int64_t>(
      limits.num_sms / std::max<std::int64_t>(tiles, 1), target_attention_impl::kMaxSplits);
  if (most < 2 || p.user_offsets != nullptr) return 1;
  const std::int64_t blocks_of_range = ceil_divide(blocks, most);
  if (blocks - blocks_of_range < kLeastBlocksSpared) return 1;
  return static_cast<int>(ceil_divide(blocks, blocks_of_range));
}

}  // namespace

std::string to_string(const TargetAttentionCudaConfig& config) {
  if (config.kernel == TargetAttentionKernel::kNone) return "composite";
  std::ostringstream text;
  text << "target_attention_sm90<head_dim=" << config.head_dim << ",key_block=" << config.key_block;
  if (config.num_splits > 1) text << ",splits=" << config.num_splits;
  text << ">";
  return text.str();
}

TargetAttentionCudaConfig select_target_attention_cuda_config(const TargetAttentionParams& params,
                                                              const DeviceLimits& limits) {
  const bool is_16_bit = params.dtype == DType::kFloat16 || params.dtype == DType::kBFloat16;
  const auto* head_dim =
      std::find_if(kHeadDims.begin(), kHeadDims.end(), [&](int d) { return d >= params.head_dim; });
  const bool is_packed = params.user_offsets != nullptr;
  const bool fits = limits.compute_capability == 90 && is_16_bit && params.head_dim > 0 &&
                    params.head_dim % 8 == 0 && head_dim != kHeadDims.end() &&
                    params.num_keys > 0 && params.num_users > 0 && params.scale > 0 &&
                    params.user_mask == nullptr && is_aligned(params.q, params.stride_q) &&
                    is_tma_history(params.k, params.stride_k, is_packed) &&
                    is_tma_history(params.v, params.stride_v, is_packed) &&
                    reinterpret_cast<std::uintptr_t>(params.out) % 16 == 0;
  if (!fits) return {};
  return {.kernel = TargetAttentionKernel::kSm90,
          .head_dim = *head_dim,
          .key_block = target_attention_impl::key_block_of(*head_dim),
          .num_splits = splits_of(params, *head_dim, limits)};
}

std::size_t target_attention_workspace_bytes(const TargetAttentionParams& params,
                                             const TargetAttentionCudaConfig& config) {
  if (config.kernel == TargetAttentionKernel::kNone) return 0;
  return target_attention_impl::make_workspace_layout(params, config).total_bytes;
}

}  // namespace ikbo
