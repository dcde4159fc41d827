// SPDX-License-Identifier: Apache-2.0
// Which kernel ikbo::target_attention takes on a GPU.
#include <gtest/gtest.h>

#include <string>

#include "ikbo/target_attention_cuda.h"
#include "kernels/target_attention/target_attention_layout.h"

namespace ikbo {
namespace {

constexpr DeviceLimits kHopper{.compute_capability = 90, .num_sms = 132};
// Addresses that are never read.
alignas(16) unsigned char memory[16];

TargetAttentionParams make_params(int head_dim = 128) {
  TargetAttentionParams p;
  p.num_users = 4;
  p.num_candidates = 100;
  p.num_queries = 3;
  p.num_keys = 50;
  p.num_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = head_dim;
  p.dtype = DType::kFloat16;
  p.scale = 0.1;
  p.q = p.k = p.v = memory;
  p.out = memory;
  p.stride_q = {12 * std::int64_t{head_dim}, 4 * std::int64_t{head_dim}, head_dim, 1};
  p.stride_k = {100 * std::int64_t{head_dim}, 2 * std::int64_t{head_dim}, head_dim, 1};
  p.stride_v = p.stride_k;
  return p;
}

std::string chosen(const TargetAttentionParams& params, const DeviceLimits& limits = kHopper) {
  return to_string(select_target_attention_cuda_config(params, limits));
}

TEST(TargetAttentionCudaConfig, HopperFillsTheHeadUp) {
  EXPECT_EQ(chosen(make_params()), "target_attention_sm90<head_dim=128,key_block=128>");
  EXPECT_EQ(chosen(make_params(8)), "target_attention_sm90<head_dim=32,key_block=64>");
  EXPECT_EQ(chosen(make_params(72)), "target_attention_sm90<head_dim=96,key_block=128>");
  EXPECT_EQ(chosen(make_params(136)), "target_attention_sm90<head_dim=192,key_block=64>");
  EXPECT_EQ(chosen(make_params(256)), "target_attention_sm90<head_dim=256,key_block=64>");
}

TEST(TargetAttentionCudaConfig, FewRowsSplitTheHistory) {
  TargetAttentionParams p = make_params();
  p.num_users = 1;
  p.num_candidates = 64;
  p.num_queries = 1;
  p.num_keys = 16384;
  EXPECT_EQ(chosen(p), "target_attention_sm90<head_dim=128,key_block=128,splits=64>");
  p.num_users = 40;  // 80 tiles: no second CTA for all of them
  EXPECT_EQ(chosen(p), "target_attention_sm90<head_dim=128,key_block=128>");
  p.num_users = 33;
  EXPECT_EQ(chosen(p), "target_attention_sm90<head_dim=128,key_block=128,splits=2>");
  p.num_keys = 1024;  // too short for a merge to pay
  EXPECT_EQ(chosen(p), "target_attention_sm90<head_dim=128,key_block=128>");
}

TEST(TargetAttentionCudaConfig, PackedHistoriesHaveNoStrideOfUsers) {
  TargetAttentionParams p = make_params();
  const std::int32_t offset = 0;
  p.user_offsets = &offset;
  p.stride_k[0] = p.stride_v[0] = 0;
  EXPECT_EQ(chosen(p), "target_attention_sm90<head_dim=128,key_block=128>");
}

template <typename Change>
std::string chosen_with(Change change, const DeviceLimits& limits = kHopper) {
  TargetAttentionParams params = make_params();
  change(params);
  return chosen(params, limits);
}

TEST(TargetAttentionCudaConfig, WhatHopperDoesNotTakeIsGeneric) {
  const std::string generic = "target_attention_generic<head_dim=128,key_block=64>";
  EXPECT_EQ(chosen(make_params(), {.compute_capability = 80, .num_sms = 108}), generic);
  EXPECT_EQ(chosen(make_params(), {.compute_capability = 100, .num_sms = 148}), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.scale = 0; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.scale = -1; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.num_keys = 0; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.user_mask = reinterpret_cast<const bool*>(memory); }),
            generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.q = memory + 2; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.stride_k[1] += 4; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.stride_v[0] = 0; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.stride_q[3] = 2; }), generic);
  EXPECT_EQ(chosen_with([](auto& p) { p.out = memory + 2; }), generic);
}

TEST(TargetAttentionCudaConfig, GenericFillsTheHeadUp) {
  EXPECT_EQ(chosen(make_params(1)), "target_attention_generic<head_dim=32,key_block=64>");
  EXPECT_EQ(chosen(make_params(12)), "target_attention_generic<head_dim=32,key_block=64>");
  EXPECT_EQ(chosen(make_params(129)), "target_attention_generic<head_dim=192,key_block=32>");
  EXPECT_EQ(chosen(make_params(255)), "target_attention_generic<head_dim=256,key_block=32>");
  const auto fp32 = [](int head_dim) {
    TargetAttentionParams p = make_params(head_dim);
    p.dtype = DType::kFloat32;
    return chosen(p);
  };
  EXPECT_EQ(fp32(64), "target_attention_generic<head_dim=64,key_block=64>");
  EXPECT_EQ(fp32(128), "target_attention_generic<head_dim=128,key_block=32>");
  EXPECT_EQ(fp32(256), "target_attention_generic<head_dim=256,key_block=16>");
}

TEST(TargetAttentionCudaConfig, FewRowsSplitTheHistoryForTheGenericKernelToo) {
  TargetAttentionParams p = make_params();
  p.dtype = DType::kFloat32;
  p.num_users = 1;
  p.num_candidates = 64;
  p.num_queries = 1;
  p.num_keys = 16384;
  // 64 rows of each kv head are a tile, 2 * 132 CTAs at most are wanted.
  p.num_heads = 2;
  EXPECT_EQ(chosen(p), "target_attention_generic<head_dim=128,key_block=32,splits=64>");
  p.num_users = 33;  // 66 tiles
  EXPECT_EQ(chosen(p), "target_attention_generic<head_dim=128,key_block=32,splits=4>");
  p.num_users = 64;
  EXPECT_EQ(chosen(p), "target_attention_generic<head_dim=128,key_block=32,splits=2>");
  p.num_keys = 256;  // too short for a merge to pay
  EXPECT_EQ(chosen(p), "target_attention_generic<head_dim=128,key_block=32>");
}

TEST(TargetAttentionCudaConfig, EverythingElseIsComposed) {
  EXPECT_EQ(chosen(make_params(), {.compute_capability = 75, .num_sms = 40}), "composite");
  EXPECT_EQ(chosen(make_params(257)), "composite");
  EXPECT_EQ(chosen(make_params(0)), "composite");
  EXPECT_EQ(chosen_with([](auto& p) { p.dtype = DType::kFloat64; }), "composite");
  EXPECT_EQ(chosen_with([](auto& p) { p.num_users = 0; }), "composite");
  // Rows of a kv head that int32 does not count.
  EXPECT_EQ(chosen_with([](auto& p) {
              p.user_mask = reinterpret_cast<const bool*>(memory);
              p.num_candidates = 1 << 30;
              p.num_queries = 1;
            }),
            "composite");
}

TEST(TargetAttentionCudaConfig, WorkspaceHoldsATileForEveryUserWithCandidates) {
  TargetAttentionParams params = make_params();
  // 100 candidates of 3 queries and 2 heads a kv head.
  const TargetAttentionCudaConfig config = select_target_attention_cuda_config(params, kHopper);
  EXPECT_EQ(target_attention_impl::max_tiles(params, config), 600 / 128 + 4);
  params.num_users = 1000;
  EXPECT_EQ(target_attention_impl::max_tiles(params, config), 600 / 128 + 100);
  EXPECT_EQ(target_attention_workspace_bytes(params, {}), 0U);
  TargetAttentionCudaConfig generic = config;
  generic.kernel = TargetAttentionKernel::kGeneric;
  EXPECT_EQ(target_attention_impl::max_tiles(params, generic), 600 / 64 + 100);
  EXPECT_GE(target_attention_workspace_bytes(params,
                                             select_target_attention_cuda_config(params, kHopper)),
            sizeof(target_attention_impl::Tile) * 104 + 4 * (3 * 1000 + 100));
}

}  // namespace
}  // namespace ikbo
