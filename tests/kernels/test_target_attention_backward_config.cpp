// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "ikbo/target_attention_backward_cuda.h"
#include "kernels/target_attention_backward/target_attention_backward_layout.h"

namespace ikbo {
namespace {

const DeviceLimits kH200{.compute_capability = 90, .num_sms = 132};

TargetAttentionParams params_of(int head_dim, DType dtype = DType::kFloat16) {
  TargetAttentionParams p;
  p.num_users = 15;
  p.num_candidates = 1050;
  p.num_queries = 64;
  p.num_keys = 512;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = head_dim;
  p.dtype = dtype;
  return p;
}

std::string kernel_of(const TargetAttentionParams& p, const DeviceLimits& limits = kH200) {
  return to_string(select_target_attention_backward_config(p, limits));
}

TEST(TargetAttentionBackwardConfig, FillsUpTheWidth) {
  for (const auto& [head_dim, width] : {std::pair{8, "32"}, {32, "32"}, {40, "64"}, {128, "128"}}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      EXPECT_EQ(kernel_of(params_of(head_dim, dtype)),
                std::string("target_attention_backward_mma<head_dim=") + width + ">");
    }
  }
}

TEST(TargetAttentionBackwardConfig, LeavesTheRestToTheComposite) {
  EXPECT_EQ(kernel_of(params_of(136)), "composite");
  EXPECT_EQ(kernel_of(params_of(60)), "composite");
  EXPECT_EQ(kernel_of(params_of(64, DType::kFloat32)), "composite");
  EXPECT_EQ(kernel_of(params_of(64), {.compute_capability = 75, .num_sms = 40}), "composite");
  EXPECT_EQ(kernel_of(params_of(64), {.compute_capability = 80, .num_sms = 108}),
            "target_attention_backward_mma<head_dim=64>");
  const bool mask = true;
  TargetAttentionParams masked = params_of(64);
  masked.user_mask = &mask;
  EXPECT_EQ(kernel_of(masked), "composite");
  const std::int32_t offset = 0;
  TargetAttentionParams packed = params_of(64);
  packed.user_offsets = &offset;
  EXPECT_EQ(kernel_of(packed), "composite");
}

TEST(TargetAttentionBackwardConfig, LeavesNothingToDoAndTooMuchToTheComposite) {
  for (auto size : {&TargetAttentionParams::num_users, &TargetAttentionParams::num_candidates,
                    &TargetAttentionParams::num_queries, &TargetAttentionParams::num_keys,
                    &TargetAttentionParams::num_heads}) {
    TargetAttentionParams p = params_of(64);
    p.*size = 0;
    EXPECT_EQ(kernel_of(p), "composite");
  }
  TargetAttentionParams p = params_of(64);
  p.num_candidates = 1 << 24;  // 2^24 * 64 * 2 rows of a kv head
  EXPECT_EQ(kernel_of(p), "composite");
}

TEST(TargetAttentionBackwardConfig, BoundsTheTilesAndTheWorkspace) {
  using namespace target_attention_backward_impl;
  const TargetAttentionParams p = params_of(64);
  EXPECT_EQ(max_row_tiles(p), 1050 * 128 / 64 + 15);
  const WorkspaceLayout layout = make_workspace_layout(p);
  EXPECT_EQ(layout.first_tiles % 16, 0U);
  EXPECT_GE(layout.num_keys - layout.first_tiles, 4U * 16);
  EXPECT_EQ(target_attention_backward_workspace_bytes(p) - layout.row_terms, 4U * 1050 * 4 * 64);
}

}  // namespace
}  // namespace ikbo
