// SPDX-License-Identifier: Apache-2.0
// Which generic LCE kernel runs, with which tiles and copies.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "ikbo/lce.h"
#include "kernels/lce/lce_generic.h"

namespace ikbo {
namespace {

constexpr DeviceLimits kAmpere{.compute_capability = 80, .num_sms = 108};
constexpr DeviceLimits kHopper{.compute_capability = 90, .num_sms = 132};

// Contiguous tensors at aligned addresses that are never read.
LceParams make_params(int users, int candidates, int m, int n, int k_user, int k_cand,
                      DType dtype = DType::kFloat16) {
  alignas(256) static std::array<std::byte, 256> memory;
  return {.num_users = users,
          .num_candidates = candidates,
          .m = m,
          .n = n,
          .k_user = k_user,
          .k_cand = k_cand,
          .dtype = dtype,
          .e_user = memory.data(),
          .e_cand = memory.data(),
          .w_user = memory.data(),
          .w_cand = memory.data(),
          .out = memory.data(),
          .stride_e_user_u = std::int64_t{k_user} * n,
          .stride_e_user_k = n,
          .stride_e_cand_b = std::int64_t{k_cand} * n,
          .stride_e_cand_k = n,
          .stride_w_user_m = k_user,
          .stride_w_cand_m = k_cand};
}

TEST(LceGenericConfig, TensorCoresFor16BitTypesOnEveryArchitectureButHopper) {
  for (const int capability : {80, 86, 89, 100, 103, 120}) {
    const DeviceLimits limits{.compute_capability = capability, .num_sms = 100};
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const LceParams params = make_params(15, 1024, 433, 256, 1178, 866, dtype);
      EXPECT_EQ(select_lce_config(params, limits).kernel, LceKernel::kMma) << capability;
    }
  }
}

TEST(LceGenericConfig, Fp32RunsPlainMultiplyAdds) {
  const LceParams params = make_params(15, 1024, 433, 256, 1178, 866, DType::kFloat32);
  EXPECT_EQ(to_string(select_lce_config(params, kHopper)), "lce_simt");
  EXPECT_EQ(to_string(select_lce_config(params, kAmpere)), "lce_simt");
}

TEST(LceGenericConfig, HopperRunsItWhereTheCopyEngineDoesNotReach) {
  EXPECT_EQ(select_lce_config(make_params(2, 64, 70, 64, 40, 70), kHopper).kernel,
            LceKernel::kSm90);
  // N, a stride, an address or an empty side that the copy engine refuses.
  EXPECT_EQ(select_lce_config(make_params(2, 64, 70, 13, 40, 70), kHopper).kernel, LceKernel::kMma);
  EXPECT_EQ(select_lce_config(make_params(2, 64, 70, 64, 0, 70), kHopper).kernel, LceKernel::kMma);
  EXPECT_EQ(select_lce_config(make_params(2, 64, 70, 64, 40, 0), kHopper).kernel, LceKernel::kMma);
  LceParams transposed = make_params(2, 64, 70, 64, 40, 70);
  transposed.stride_e_cand_k = 1;
  transposed.stride_e_cand_n = 70;
  EXPECT_EQ(select_lce_config(transposed, kHopper).kernel, LceKernel::kMma);
  LceParams shifted = make_params(2, 64, 70, 64, 40, 70);
  shifted.e_cand = static_cast<const std::byte*>(shifted.e_cand) + 2;
  EXPECT_EQ(select_lce_config(shifted, kHopper).kernel, LceKernel::kMma);
}

TEST(LceGenericConfig, SmallTilesUntilLargeOnesFillTheDevice) {
  // 4 users are less than one wave of either tile; 1024 candidates are 38 waves of large tiles,
  // which cost 8 each, or 67 of small ones, which cost 5.
  const LceConfig config = select_lce_config(make_params(4, 1024, 433, 256, 1178, 866), kAmpere);
  EXPECT_EQ(to_string(config), "lce_mma<tile=128,user_tile=64>");
  // An odd N is copied element by element.
  EXPECT_EQ(select_lce_config(make_params(4, 1024, 433, 255, 1178, 866), kAmpere).tile_m, 64);
  // 64 rows of M fill a small tile and half of a large one.
  EXPECT_EQ(select_lce_config(make_params(4, 4096, 64, 64, 100, 100), kAmpere).tile_m, 64);
}

TEST(LceGenericConfig, CopiesAreAsWideAsAddressesAndStridesAllow) {
  alignas(16) std::array<std::uint16_t, 16> data{};
  EXPECT_EQ(lce_impl::copy_width(data.data(), 1, 64, 64, 640), 8);
  EXPECT_EQ(lce_impl::copy_width(data.data(), 1, 12, 12, 120), 2);
  EXPECT_EQ(lce_impl::copy_width(data.data(), 1, 13, 13, 130), 1);
  EXPECT_EQ(lce_impl::copy_width(data.data(), 1, 64, 64, 641), 1);
  EXPECT_EQ(lce_impl::copy_width(data.data(), 1, 64, 66, 640), 2);
  EXPECT_EQ(lce_impl::copy_width(data.data() + 2, 1, 64, 64, 640), 2);
  EXPECT_EQ(lce_impl::copy_width(data.data() + 1, 1, 64, 64, 640), 1);
  EXPECT_EQ(lce_impl::copy_width(data.data(), 2, 64, 64, 640), 1);
  // Rows that are padded to whole copies but end inside one.
  EXPECT_EQ(lce_impl::copy_width(data.data(), 1, 13, 16, 160), 1);
}

}  // namespace
}  // namespace ikbo
