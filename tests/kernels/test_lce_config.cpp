// SPDX-License-Identifier: Apache-2.0
// Which kernel ikbo::lce takes on Hopper, and how its CTAs share the work.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ikbo/lce.h"
#include "kernels/lce/lce_layout.h"

namespace ikbo {
namespace {

constexpr DeviceLimits kHopper{.compute_capability = 90, .num_sms = 132};
// Addresses that are never read.
alignas(16) unsigned char memory[16];
void* const kAligned = memory;
void* const kOdd = memory + 2;

LceParams make_params(int users, int candidates, int m = 433, int n = 256) {
  return {.num_users = users,
          .num_candidates = candidates,
          .m = m,
          .n = n,
          .k_user = 1178,
          .k_cand = 866,
          .e_user = kAligned,
          .e_cand = kAligned,
          .out = kAligned,
          .stride_e_user_u = 1178 * std::int64_t{n},
          .stride_e_user_k = n,
          .stride_e_cand_b = 866 * std::int64_t{n},
          .stride_e_cand_k = n};
}

std::string chosen(const LceParams& params, const DeviceLimits& limits = kHopper) {
  return to_string(select_lce_config(params, limits));
}

TEST(LceConfig, HopperTakesTilesWithTheLeastPadding) {
  EXPECT_EQ(chosen(make_params(15, 1024)), "lce_sm90<tile_m=224,user_units=1>");
  EXPECT_EQ(chosen(make_params(15, 1024, 64)), "lce_sm90<tile_m=64,user_units=1>");
  EXPECT_EQ(chosen(make_params(15, 1024, 300)), "lce_sm90<tile_m=160,user_units=1>");
  EXPECT_EQ(chosen(make_params(200, 1024)), "lce_sm90<tile_m=224,user_units=2>");
}

TEST(LceConfig, OneCandidateAUserNeedsNoUserStage) {
  EXPECT_EQ(chosen(make_params(1024, 1024)), "lce_sm90<tile_m=224,dual_k>");
  EXPECT_EQ(chosen(make_params(1024, 100)), "lce_sm90<tile_m=224,dual_k>");
  EXPECT_FALSE(select_lce_config(make_params(512, 1024), kHopper).dual_k);
}

TEST(LceConfig, FewTilesAreNarrowAndBothStagesRunAtOnce) {
  EXPECT_EQ(chosen(make_params(1, 1)), "lce_sm90<tile_m=64,user_units=1>");
  EXPECT_EQ(chosen(make_params(1, 4)), "lce_sm90<tile_m=64,user_units=1>");
  EXPECT_EQ(chosen(make_params(1, 8)), "lce_sm90<tile_m=128,user_units=1>");
  // Narrower ones do not fit side by side; both stages with these do.
  EXPECT_EQ(chosen(make_params(8, 8)), "lce_sm90<tile_m=224,user_units=1>");
  EXPECT_EQ(chosen(make_params(32, 32)), "lce_sm90<tile_m=224,dual_k>");
  EXPECT_EQ(chosen(make_params(1, 1, 16, 64)), "lce_sm90<tile_m=64,user_units=1>");
  // So little work that another launch would cost more than it.
  LceParams short_k = make_params(1, 1);
  short_k.k_user = 64;
  EXPECT_EQ(chosen(short_k), "lce_sm90<tile_m=64,dual_k>");
}

TEST(LceConfig, APackedWeightKeepsTheTilesOfItsM) {
  LceParams params = make_params(1, 1);
  params.w_cand_packed = kAligned;
  const LceConfig config = select_lce_config(params, kHopper);
  EXPECT_EQ(config.tile_m, select_lce_pack_config(params.m, params.dtype, kHopper).tile_m);
  EXPECT_FALSE(config.dual_k);
}

TEST(LceConfig, WhatTheCopyEngineCannotReadGoesToTheGenericKernels) {
  LceParams odd = make_params(15, 1024);
  odd.e_cand = kOdd;
  EXPECT_EQ(select_lce_config(odd, kHopper).kernel, LceKernel::kMma);
  EXPECT_EQ(select_lce_config(make_params(15, 1024, 433, 250), kHopper).kernel, LceKernel::kMma);
  EXPECT_EQ(
      select_lce_config(make_params(15, 1024), {.compute_capability = 80, .num_sms = 108}).kernel,
      LceKernel::kMma);
  LceParams single = make_params(15, 1024);
  single.dtype = DType::kFloat32;
  EXPECT_EQ(select_lce_config(single, kHopper).kernel, LceKernel::kSimt);
}

TEST(LceConfig, AListIsReadInPlaceUpToItsLimit) {
  const LcePart part{.e = kAligned, .k = 40, .stride_b = 866 * 256, .stride_k = 256};
  std::vector<LcePart> parts(lce_max_parts, part);
  LceParams params = make_params(15, 1024);
  params.cand_parts = parts.data();
  params.num_cand_parts = lce_max_parts;
  EXPECT_EQ(select_lce_config(params, kHopper).kernel, LceKernel::kSm90);
  EXPECT_EQ(lce_impl::padded_k_cand(params), lce_max_parts * 64);
  parts[3].e = kOdd;
  EXPECT_NE(select_lce_config(params, kHopper).kernel, LceKernel::kSm90);
  parts[3].k = 0;  // nothing is read of an empty tensor
  EXPECT_EQ(select_lce_config(params, kHopper).kernel, LceKernel::kSm90);
  parts.assign(lce_max_parts + 1, part);
  params.cand_parts = parts.data();
  params.num_cand_parts = lce_max_parts + 1;
  EXPECT_NE(select_lce_config(params, kHopper).kernel, LceKernel::kSm90);
}

// Every entry of the batch, slice and tile of M is in exactly one item.
TEST(LceSplit, ItemsCoverTheWork) {
  for (const int batch : {1, 2, 3, 33, 131, 1024, 3072, 100'000}) {
    for (const int slices : {1, 2, 3, 4, 8}) {
      for (const int tiles_m : {1, 2, 5}) {
        for (const int consumers : {1, 2}) {
          for (const int sms : {1, 7, 132}) {
            const lce_impl::LceSplit split =
                lce_impl::split_lce(batch, slices, tiles_m, consumers, sms);
            ASSERT_EQ(slices % split.slices_per_cta, 0);
            const int step = consumers / split.slices_per_cta;
            ASSERT_EQ(split.chunk_size % step, 0);
            const int classes = slices / split.slices_per_cta * tiles_m;
            ASSERT_EQ(split.num_items % classes, 0);
            const std::int64_t chunks = split.num_items / classes;
            ASSERT_GE(chunks * split.chunk_size, batch);
            ASSERT_LT((chunks - 1) * split.chunk_size, batch) << "an empty chunk";
          }
        }
      }
    }
  }
}

TEST(LceSplit, KeepsTheDeviceBusy) {
  // 4 CTAs walk a chunk side by side; 33 of those fill the device, each with 31 or 32 candidates.
  const lce_impl::LceSplit split = lce_impl::split_lce(1024, 4, 2, 2, 132);
  EXPECT_EQ(split.slices_per_cta, 2);
  EXPECT_EQ(split.chunk_size, 32);
  // Tiles of M that do not divide the multiprocessors: at most a tenth of the time is idle.
  for (const int tiles_m : {1, 3, 5, 7}) {
    const lce_impl::LceSplit uneven = lce_impl::split_lce(3072, 8, tiles_m, 2, 132);
    const int rounds = (uneven.num_items + 131) / 132 * uneven.chunk_size;
    EXPECT_LE(rounds, 1.1 * 3072 * 4 * tiles_m / 132 + 1) << tiles_m;
  }
}

}  // namespace
}  // namespace ikbo
