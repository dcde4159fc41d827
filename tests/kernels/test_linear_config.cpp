// SPDX-License-Identifier: Apache-2.0
// Which linear kernel runs, with which tiles, splits and copies.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "ikbo/linear.h"

namespace ikbo {
namespace {

constexpr DeviceLimits kHopper{.compute_capability = 90, .num_sms = 132};

// Contiguous tensors.
LinearParams make_params(int users, int candidates, int m, int k_user, int k_cand,
                         DType dtype = DType::kFloat16) {
  return {.num_users = users,
          .num_candidates = candidates,
          .m = m,
          .k_user = k_user,
          .k_cand = k_cand,
          .dtype = dtype,
          .stride_x_user_u = k_user,
          .stride_x_cand_b = k_cand,
          .stride_w_user_m = k_user,
          .stride_w_cand_m = k_cand};
}

std::string selected(const LinearParams& params, const DeviceLimits& limits = kHopper) {
  return to_string(select_linear_config(params, limits));
}

TEST(LinearConfig, TensorCoresFor16BitTypesOnHopper) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(select_linear_config(make_params(15, 1024, 433, 1178, 866, dtype), kHopper).kernel,
              LinearKernel::kSm90);
  }
  EXPECT_EQ(selected(make_params(15, 1024, 433, 1178, 866, DType::kFloat32)), "linear_simt");
  for (const int capability : {80, 89, 100, 120}) {
    const DeviceLimits limits{.compute_capability = capability, .num_sms = 132};
    EXPECT_EQ(selected(make_params(15, 1024, 433, 1178, 866), limits), "linear_simt");
  }
}

TEST(LinearConfig, AlignmentDecidesHowRowsAreRead) {
  const auto feeds = [](int k) {
    const LinearConfig config = select_linear_config(make_params(3, 100, 64, k, k), kHopper);
    EXPECT_EQ(config.kernel, LinearKernel::kSm90) << k;
    return std::pair(config.x_cand, config.w_cand);
  };
  for (const int k : {8, 64, 4096}) {
    EXPECT_EQ(feeds(k), std::pair(LinearFeed::kTma, LinearFeed::kTma)) << k;
  }
  for (const int k : {2, 500, 866}) {
    EXPECT_EQ(feeds(k), std::pair(LinearFeed::kAsync, LinearFeed::kAsync)) << k;
  }
  for (const int k : {1, 63, 1023}) {
    EXPECT_EQ(feeds(k), std::pair(LinearFeed::kElement, LinearFeed::kCopied)) << k;
  }
  LinearParams shifted = make_params(3, 100, 64, 128, 96);
  shifted.x_cand = reinterpret_cast<const void*>(std::uintptr_t{4});
  EXPECT_EQ(select_linear_config(shifted, kHopper).x_cand, LinearFeed::kAsync);
  shifted.x_cand = reinterpret_cast<const void*>(std::uintptr_t{2});
  EXPECT_EQ(select_linear_config(shifted, kHopper).x_cand, LinearFeed::kElement);
}

TEST(LinearConfig, ManyTilesReadACopyOfAnUnalignedWeight) {
  const LinearConfig config =
      select_linear_config(make_params(1429, 100000, 433, 1178, 866), kHopper);
  EXPECT_EQ(config.w_cand, LinearFeed::kCopied);
  EXPECT_EQ(config.x_cand, LinearFeed::kAsync);
}

TEST(LinearConfig, StridesDecide) {
  LinearParams transposed = make_params(3, 100, 64, 128, 96);
  transposed.stride_x_cand_b = 1;
  transposed.stride_x_cand_k = 100;
  EXPECT_EQ(selected(transposed), "linear_simt");
  LinearParams repeated = make_params(3, 100, 64, 128, 96);
  repeated.stride_x_cand_b = 0;
  EXPECT_EQ(select_linear_config(repeated, kHopper).x_cand, LinearFeed::kAsync);
  repeated.num_candidates = 1;  // the stride of one row does not count
  EXPECT_EQ(select_linear_config(repeated, kHopper).x_cand, LinearFeed::kTma);

  LinearParams weights = make_params(3, 100, 64, 128, 96);
  weights.stride_w_user_m = 224;  // columns of one weight for both
  weights.stride_w_cand_m = 1;    // a transposed one
  weights.stride_w_cand_k = 64;
  const LinearConfig config = select_linear_config(weights, kHopper);
  EXPECT_EQ(config.kernel, LinearKernel::kSm90);
  EXPECT_EQ(config.w_user, LinearFeed::kTma);
  EXPECT_EQ(config.w_cand, LinearFeed::kCopied);
  EXPECT_EQ(linear_workspace_bytes(weights, config),
            3 * 64 * sizeof(float) + 64 * 96 * sizeof(std::uint16_t));
  EXPECT_NE(to_string(config).find(",w_cand=copied>"), std::string::npos) << to_string(config);
}

TEST(LinearConfig, EmptySidesRunTheGenericKernel) {
  EXPECT_EQ(selected(make_params(3, 100, 64, 0, 96)), "linear_simt");
  EXPECT_EQ(selected(make_params(3, 100, 64, 128, 0)), "linear_simt");
}

TEST(LinearConfig, FewTilesSplitTheirSumAndManyDoNot) {
  const LinearConfig few = select_linear_config(make_params(1, 32, 256, 4096, 4096), kHopper);
  EXPECT_EQ(few.user.split_k, 8);
  EXPECT_EQ(few.candidate.tile_rows, 64);
  EXPECT_EQ(few.candidate.split_k, 8);
  const LinearConfig many =
      select_linear_config(make_params(1429, 100000, 433, 1178, 866), kHopper);
  EXPECT_EQ(many.candidate.tile_rows, 128);
  EXPECT_EQ(many.candidate.tile_m, 224);  // 448 columns for 433
  EXPECT_EQ(many.candidate.split_k, 1);
}

TEST(LinearConfig, TilesAreLargerWhereTheUserStageHoldsSms) {
  // 128 CTAs of 128 x 64 would wait for the 32 of the user stage; 64 of 128 x 128 need not.
  EXPECT_EQ(select_linear_config(make_params(128, 8192, 128, 512, 512), kHopper).candidate.tile_m,
            128);
}

TEST(LinearConfig, NoCtaIsWithoutAShareOfK) {
  for (const int k : {1, 64, 65, 128, 129, 300, 520}) {
    const LinearConfig config = select_linear_config(make_params(2, 9, 16, k, k), kHopper);
    EXPECT_LE(config.candidate.split_k, (k + 63) / 64) << k;
  }
}

}  // namespace
}  // namespace ikbo
