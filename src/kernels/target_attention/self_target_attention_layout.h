// SPDX-License-Identifier: Apache-2.0
// What self_target_attention adds to the layout of target attention: the histories' own rows.
#pragma once

#include "ikbo/self_target_attention_cuda.h"
#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo::target_attention_impl {

// The histories' own rows as if each history were one candidate with S queries; not their limits.
inline TargetAttentionParams own_part(const SelfTargetAttentionParams& p) {
  TargetAttentionParams own = p.cand;
  own.num_candidates = own.num_users;
  own.num_queries = own.num_keys;
  own.q = p.q_user;
  own.stride_q = p.stride_q_user;
  own.out = p.out_user;
  own.lse = p.lse_user;
  return own;
}

// Of each kv head, for a history of S keys.
inline int own_tiles_of_user(const SelfTargetAttentionParams& p, int head_dim) {
  const int tile_rows = tile_rows_of(head_dim);
  return static_cast<int>((rows_of_candidate(own_part(p)) + tile_rows - 1) / tile_rows);
}
inline std::int64_t max_own_tiles(const SelfTargetAttentionParams& p, int head_dim) {
  return std::int64_t{p.cand.num_users} * own_tiles_of_user(p, head_dim);
}

inline bool groups_in_each_cta(const SelfTargetAttentionParams& p, int head_dim) {
  return groups_in_each_cta(p.cand) &&
         (!p.is_causal || own_tiles_of_user(p, head_dim) <= kMaxLevelsOfCta);
}

inline TargetAttentionCudaConfig cand_config(const SelfTargetAttentionCudaConfig& config) {
  return {.kernel = TargetAttentionKernel::kSm90,
          .head_dim = config.head_dim,
          .key_block = config.key_block};
}
inline WorkspaceLayout make_workspace_layout(const SelfTargetAttentionParams& p,
                                             const SelfTargetAttentionCudaConfig& config) {
  return make_workspace_layout(p.cand, cand_config(config), max_own_tiles(p, config.head_dim));
}

}  // namespace ikbo::target_attention_impl
