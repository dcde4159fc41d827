// SPDX-License-Identifier: Apache-2.0
// Host side of target_attention_generic: how operands are copied, arguments, choice of an instance.
#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/target_attention/target_attention_generic.h"
#include "kernels/target_attention/target_attention_generic_launch.h"

namespace ikbo::target_attention_impl {
namespace {

GenericOperand make_operand(const void* data, const std::array<std::int64_t, 4>& stride,
                            DType dtype) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const auto is_aligned = [&](std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 &&
           std::all_of(stride.begin(), stride.begin() + 3,
                       [&](std::int64_t s) { return s * element % bytes == 0; });
  };
  CopyWidth width = CopyWidth::kElement;
  if (stride[3] == 1 && is_aligned(16)) {
    width = CopyWidth::kVector;
  } else if (element == 4 || (stride[3] == 1 && is_aligned(4))) {
    width = CopyWidth::kWord;
  }
  return {.data = data,
          .stride = {stride[0], stride[1], stride[2], stride[3]},
          .width = width,
          .along_rows = stride[3] > 1 && stride[1] < stride[3]};
}

GenericArgs make_args(const TargetAttentionParams& p, const TargetAttentionCudaConfig& config,
                      unsigned char* workspace) {
  const WorkspaceLayout layout = make_workspace_layout(p, config);
  const auto floats = [&](std::size_t offset) {
    return reinterpret_cast<float*>(workspace + offset);
  };
  const bool is_split = config.num_splits > 1;
  const int group = p.num_heads / p.num_kv_heads;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  auto scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  // 0 times infinity is no logit. Times the least float, every logit is as good as 0.
  if (scale_log2 == 0) scale_log2 = std::numeric_limits<float>::min();
  std::array<std::int64_t, 4> stride_k = p.stride_k;
  std::array<std::int64_t, 4> stride_v = p.stride_v;
  if (p.user_offsets != nullptr) stride_k[0] = stride_v[0] = 0;  // there is one history
  return {.num_tiles = reinterpret_cast<const std::int32_t*>(workspace + layout.num_tiles),
          .tiles = reinterpret_cast<const Tile*>(workspace + layout.tiles),
          .grouped_cands = reinterpret_cast<const std::int32_t*>(workspace + layout.grouped_cands),
          .q = make_operand(p.q, p.stride_q, p.dtype),
          .k = make_operand(p.k, stride_k, p.dtype),
          .v = make_operand(p.v, stride_v, p.dtype),
          .cand_lengths = p.cand_lengths,
          .user_mask = p.user_mask,
          .out = p.out,
          .lse = static_cast<float*>(p.lse),
          .partial_out = is_split ? floats(layout.partial_out) : nullptr,
          .partial_lse = is_split ? floats(layout.partial_lse) : nullptr,
          .num_keys = p.num_keys,
          .num_queries = p.num_queries,
          .num_heads = p.num_heads,
          .num_kv_heads = p.num_kv_heads,
          .group = group,
          .head_dim = p.head_dim,
          .num_splits = config.num_splits,
          .stores_vectors = false,
          .scale_log2 = scale_log2,
          .absent_logit = scale_log2 > 0 ? -kInfinity : kInfinity,
          .divide_by_group = device::FastDivide(group),
          .divide_by_queries = device::FastDivide(p.num_queries)};
}

}  // namespace

void launch_generic(const TargetAttentionParams& params, const TargetAttentionCudaConfig& config,
                    int num_sms, unsigned char* workspace, cudaStream_t stream) {
  const GenericLaunch launch{.args = make_args(params, config, workspace),
                             .head_dim = config.head_dim,
                             .max_tiles = max_tiles(params, config) * params.num_kv_heads,
                             .num_sms = num_sms,
                             .stream = stream};
  switch (params.dtype) {
    case DType::kFloat16:
      return launch_generic_of<__half>(launch);
    case DType::kBFloat16:
      return launch_generic_of<__nv_bfloat16>(launch);
    case DType::kFloat32:
      return launch_generic_of<float>(launch);
    default:
      detail::throw_error(__FILE__, __LINE__, "ikbo::target_attention: ", to_string(config),
                          " takes float16, bfloat16 and float32; got ", name_of(params.dtype));
  }
}

}  // namespace ikbo::target_attention_impl
