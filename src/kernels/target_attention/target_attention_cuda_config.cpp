// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel of target attention runs for which params.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
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

// Into how many ranges a user's keys are split, so that each of `num_ctas` has some. Lengths are on
// the device: all are taken for S. Of packed histories nothing is known.
int splits_of(const TargetAttentionParams& p, int tile_rows, int key_block, int num_ctas) {
  const auto ceil_divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t rows = target_attention_impl::rows_of_candidate(p) * p.num_candidates;
  const std::int64_t tiles = std::max<std::int64_t>(ceil_divide(rows, tile_rows),
                                                    std::min(p.num_users, p.num_candidates)) *
                             p.num_kv_heads;
  const std::int64_t blocks = ceil_divide(p.num_keys, key_block);
  const std::int64_t most = std::min<std::int64_t>(num_ctas / std::max<std::int64_t>(tiles, 1),
                                                   target_attention_impl::kMaxSplits);
  if (most < 2 || p.user_offsets != nullptr) return 1;
  const std::int64_t blocks_of_range = ceil_divide(blocks, most);
  if (blocks - blocks_of_range < kLeastBlocksSpared) return 1;
  return static_cast<int>(ceil_divide(blocks, blocks_of_range));
}

bool fits_sm90(const TargetAttentionParams& p, const DeviceLimits& limits) {
  const bool is_packed = p.user_offsets != nullptr;
  return limits.compute_capability == 90 && size_of(p.dtype) == 2 && p.head_dim % 8 == 0 &&
         p.num_keys > 0 && p.scale > 0 && p.user_mask == nullptr && is_aligned(p.q, p.stride_q) &&
         is_tma_history(p.k, p.stride_k, is_packed) && is_tma_history(p.v, p.stride_v, is_packed) &&
         reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0;
}

bool fits_generic(const TargetAttentionParams& p, const DeviceLimits& limits) {
  // Rows of a kv head, of all candidates, are counted in int32.
  const std::int64_t rows = target_attention_impl::rows_of_candidate(p) * p.num_candidates;
  return limits.compute_capability >= 80 && size_of(p.dtype) <= 4 &&
         rows <= std::numeric_limits<std::int32_t>::max() - target_attention_impl::kGenericTileRows;
}

}  // namespace

std::string to_string(const TargetAttentionCudaConfig& config) {
  if (config.kernel == TargetAttentionKernel::kNone) return "composite";
  std::ostringstream text;
  const bool is_generic = config.kernel == TargetAttentionKernel::kGeneric;
  text << "target_attention_" << (is_generic ? "generic" : "sm90")
       << "<head_dim=" << config.head_dim << ",key_block=" << config.key_block;
  if (config.num_splits > 1) text << ",splits=" << config.num_splits;
  text << ">";
  return text.str();
}

TargetAttentionCudaConfig select_target_attention_cuda_config(const TargetAttentionParams& params,
                                                              const DeviceLimits& limits) {
  const auto* head_dim =
      std::find_if(kHeadDims.begin(), kHeadDims.end(), [&](int d) { return d >= params.head_dim; });
  if (params.head_dim <= 0 || head_dim == kHeadDims.end() || params.num_users <= 0) return {};
  TargetAttentionCudaConfig config{.head_dim = *head_dim};
  int num_ctas = limits.num_sms;
  if (fits_sm90(params, limits)) {
    config.kernel = TargetAttentionKernel::kSm90;
    config.key_block = target_attention_impl::key_block_of(*head_dim);
  } else if (fits_generic(params, limits)) {
    config.kernel = TargetAttentionKernel::kGeneric;
    config.key_block = target_attention_impl::generic_key_block_of(
        *head_dim * static_cast<int>(size_of(params.dtype)));
    num_ctas *= 2;  // an SM has room for two at least
  } else {
    return {};
  }
  config.num_splits =
      splits_of(params, target_attention_impl::tile_rows_of(config), config.key_block, num_ctas);
  return config;
}

std::size_t target_attention_workspace_bytes(const TargetAttentionParams& params,
                                             const TargetAttentionCudaConfig& config) {
  if (config.kernel == TargetAttentionKernel::kNone) return 0;
  return target_attention_impl::make_workspace_layout(params, config).total_bytes;
}

}  // namespace ikbo
