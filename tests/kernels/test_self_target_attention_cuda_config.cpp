// SPDX-License-Identifier: Apache-2.0
// Which kernel ikbo::self_target_attention takes on a GPU.
#include <gtest/gtest.h>

#include <string>

#include "ikbo/self_target_attention_cuda.h"
#include "kernels/target_attention/self_target_attention_layout.h"

namespace ikbo {
namespace {

constexpr DeviceLimits kHopper{.compute_capability = 90, .num_sms = 132};
// Addresses that are never read.
alignas(16) unsigned char memory[16];

SelfTargetAttentionParams make_params(int head_dim = 128) {
  SelfTargetAttentionParams params;
  TargetAttentionParams& p = params.cand;
  p.num_users = 4;
  p.num_candidates = 100;
  p.num_queries = 3;
  p.num_keys = 50;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = head_dim;
  p.dtype = DType::kFloat16;
  p.scale = 0.1;
  p.q = p.k = p.v = params.q_user = memory;
  p.out = params.out_user = memory;
  const std::int64_t d = head_dim;
  p.stride_q = {12 * d, 4 * d, d, 1};
  p.stride_k = p.stride_v = {100 * d, 2 * d, d, 1};
  params.stride_q_user = {200 * d, 4 * d, d, 1};
  return params;
}

std::string chosen(const SelfTargetAttentionParams& params, const DeviceLimits& limits = kHopper) {
  return to_string(select_self_target_attention_cuda_config(params, limits));
}

TEST(SelfTargetAttentionCudaConfig, HopperFillsTheHeadUp) {
  EXPECT_EQ(chosen(make_params()), "self_target_attention_sm90<head_dim=128,key_block=128>");
  EXPECT_EQ(chosen(make_params(8)), "self_target_attention_sm90<head_dim=32,key_block=64>");
  EXPECT_EQ(chosen(make_params(200)), "self_target_attention_sm90<head_dim=256,key_block=64>");
}

TEST(SelfTargetAttentionCudaConfig, KeysAreNeverSplit) {
  SelfTargetAttentionParams params = make_params();
  params.cand.num_users = 1;
  params.cand.num_queries = 1;
  params.cand.num_keys = 16384;
  EXPECT_GT(select_target_attention_cuda_config(params.cand, kHopper).num_splits, 1);
  EXPECT_EQ(chosen(params), "self_target_attention_sm90<head_dim=128,key_block=128>");
}

TEST(SelfTargetAttentionCudaConfig, HistoriesWithoutCandidatesHaveAKernel) {
  SelfTargetAttentionParams params = make_params();
  params.cand.num_candidates = 0;
  params.cand.q = params.cand.out = nullptr;
  EXPECT_EQ(chosen(params), "self_target_attention_sm90<head_dim=128,key_block=128>");
}

TEST(SelfTargetAttentionCudaConfig, EverythingElseIsComposed) {
  EXPECT_EQ(chosen(make_params(), {.compute_capability = 80, .num_sms = 108}), "composite");
  EXPECT_EQ(chosen(make_params(12)), "composite");
  const auto with = [](auto change) {
    SelfTargetAttentionParams params = make_params();
    change(params);
    return chosen(params);
  };
  EXPECT_EQ(with([](auto& p) { p.cand.dtype = DType::kFloat32; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.cand.scale = -1; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.cand.num_users = 0; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.cand.q = memory + 2; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.q_user = memory + 2; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.stride_q_user[2] += 4; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.out_user = memory + 8; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.cand.stride_k[1] += 4; }), "composite");
  const std::int32_t offset = 0;
  EXPECT_EQ(with([&](auto& p) { p.cand.user_offsets = &offset; }), "composite");
}

TEST(SelfTargetAttentionCudaConfig, WorkspaceHoldsTheTilesOfBothKinds) {
  SelfTargetAttentionParams params = make_params();
  const SelfTargetAttentionCudaConfig config =
      select_self_target_attention_cuda_config(params, kHopper);
  // 50 queries of 2 heads a kv head.
  EXPECT_EQ(target_attention_impl::max_own_tiles(params, config.head_dim), 4);
  params.cand.num_keys = 65;
  EXPECT_EQ(target_attention_impl::max_own_tiles(params, config.head_dim), 8);
  const std::size_t tiles = 600 / 128 + 4 + 8;
  EXPECT_GE(self_target_attention_workspace_bytes(params, config),
            tiles * sizeof(target_attention_impl::Tile) + 4 * (3 * 4 + 100));
  EXPECT_EQ(self_target_attention_workspace_bytes(params, {}), 0U);
}

TEST(SelfTargetAttentionCudaConfig, CtasListAsManyTilesAsTheyHaveRoomFor) {
  SelfTargetAttentionParams params = make_params();
  params.cand.num_keys = 64 * target_attention_impl::kMaxLevelsOfCta;
  EXPECT_TRUE(target_attention_impl::groups_in_each_cta(params, 128));
  params.cand.num_keys += 1;
  EXPECT_TRUE(target_attention_impl::groups_in_each_cta(params, 128));
  params.is_causal = true;
  EXPECT_FALSE(target_attention_impl::groups_in_each_cta(params, 128));
  params.cand.num_keys -= 1;
  EXPECT_TRUE(target_attention_impl::groups_in_each_cta(params, 128));
  params.cand.num_users = device::kMaxUsersOfCta + 1;
  EXPECT_FALSE(target_attention_impl::groups_in_each_cta(params, 128));
}

}  // namespace
}  // namespace ikbo
