// SPDX-License-Identifier: Apache-2.0
// Which kernel ikbo::bmm takes on a GPU.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "ikbo/bmm_cuda.h"
#include "kernels/bmm/bmm_layout.h"

namespace ikbo {
namespace {

constexpr DeviceLimits kHopper{.compute_capability = 90, .num_sms = 132};
constexpr DeviceLimits kAmpere{.compute_capability = 80, .num_sms = 108};
// Addresses that are never read.
alignas(16) unsigned char memory[16];

struct Sizes {
  int p = 256;
  int r = 128;
  int n = 32;
  int num_candidates = 4096;
  int num_users = 64;
  bool transpose_a = false;
  bool transpose_b = false;
};

BmmParams make_params(const Sizes& s) {
  return {.num_users = s.num_users,
          .num_candidates = s.num_candidates,
          .p = s.p,
          .r = s.r,
          .n = s.n,
          .dtype = DType::kFloat16,
          .a_user = memory,
          .b_cand = memory,
          .out = memory,
          .stride_a_u = std::int64_t{s.p} * s.r,
          .stride_a_p = s.transpose_a ? 1 : s.r,
          .stride_a_r = s.transpose_a ? s.p : 1,
          .stride_b_b = std::int64_t{s.r} * s.n,
          .stride_b_r = s.transpose_b ? 1 : s.n,
          .stride_b_n = s.transpose_b ? s.r : 1};
}

std::string chosen(const BmmParams& params, const DeviceLimits& limits = kHopper) {
  return to_string(select_bmm_cuda_config(params, limits));
}
std::string chosen_for(const Sizes& sizes) { return chosen(make_params(sizes)); }

TEST(BmmCudaConfig, HopperKeepsAsMuchOfAUserAsFitsTwice) {
  EXPECT_EQ(chosen_for({}), "bmm_sm90<tile_p=256,a=r,b=n,feed=tma,store=tma,users=2,stages=6>");
  EXPECT_EQ(chosen_for({.r = 64}),
            "bmm_sm90<tile_p=256,a=r,b=n,feed=tma,store=tma,users=4,stages=6>");
  EXPECT_EQ(chosen_for({.r = 256}),
            "bmm_sm90<tile_p=128,a=r,b=n,feed=tma,store=tma,users=2,stages=6>");
  EXPECT_EQ(chosen_for({.r = 256, .num_users = 1}),
            "bmm_sm90<tile_p=256,a=r,b=n,feed=tma,store=tma,users=1,stages=6>");
}

// A narrow tile would read b_cand so often that waiting for each matrix is less.
TEST(BmmCudaConfig, LargeMatricesOfManyTilesFillSharedMemoryAlone) {
  const auto choice = [](int r, int num_users) {
    const BmmCudaConfig config = select_bmm_cuda_config(
        make_params({.p = 512, .r = r, .n = 64, .num_users = num_users}), kHopper);
    return std::pair(config.tile_p, config.user_slots);
  };
  EXPECT_EQ(choice(256, 64), std::pair(256, 1));
  EXPECT_EQ(choice(512, 64), std::pair(128, 1));
  EXPECT_EQ(choice(256, 1000), std::pair(128, 2));
  EXPECT_EQ(choice(512, 4096), std::pair(64, 2));
}

TEST(BmmCudaConfig, MatricesThatDoNotFitAreStreamed) {
  EXPECT_EQ(chosen_for({.r = 1024}),
            "bmm_sm90<tile_p=256,a=r,b=n,feed=tma,store=tma,blocks=4,stages=6>");
  EXPECT_EQ(chosen_for({.p = 512, .r = 4096, .n = 64, .transpose_a = true, .transpose_b = true}),
            "bmm_sm90<tile_p=256,a=p,b=r,feed=tma,store=tma,blocks=4,stages=6>");
  EXPECT_EQ(chosen_for({.p = 64, .r = 2048}),
            "bmm_sm90<tile_p=64,a=r,b=n,feed=tma,store=tma,blocks=8,stages=14>");
  // Not by copies of 16 bytes.
  EXPECT_EQ(chosen_for({.r = 1024, .n = 24}),
            "bmm_sm90<tile_p=64,a=r,b=n,feed=async,store=vectors,users=1,stages=6>");
  EXPECT_EQ(chosen_for({.r = 1032, .n = 24}), "bmm_mma");
}

TEST(BmmCudaConfig, TilesHaveNoMoreRowsThanPNeeds) {
  const auto tile_of = [](int p) {
    return select_bmm_cuda_config(make_params({.p = p}), kHopper).tile_p;
  };
  EXPECT_EQ(tile_of(8), 64);
  EXPECT_EQ(tile_of(64), 64);
  EXPECT_EQ(tile_of(72), 128);
  EXPECT_EQ(tile_of(200), 256);
  EXPECT_EQ(tile_of(320), 192);
  EXPECT_EQ(tile_of(1000), 256);
}

TEST(BmmCudaConfig, FewCandidatesHaveNarrowTiles) {
  EXPECT_EQ(select_bmm_cuda_config(make_params({.num_candidates = 100}), kHopper).tile_p, 64);
  EXPECT_EQ(select_bmm_cuda_config(make_params({.num_candidates = 512}), kHopper).tile_p, 128);
}

TEST(BmmCudaConfig, WholeBoxesGoThroughTheCopyEngine) {
  const auto feed_of = [](int n, bool transpose_b) {
    return select_bmm_cuda_config(make_params({.n = n, .transpose_b = transpose_b}), kHopper).feed;
  };
  EXPECT_EQ(feed_of(64, false), BmmFeed::kTma);
  EXPECT_EQ(feed_of(192, false), BmmFeed::kTma);
  EXPECT_EQ(feed_of(32, false), BmmFeed::kTma);
  EXPECT_EQ(feed_of(16, false), BmmFeed::kTma);
  EXPECT_EQ(feed_of(8, false), BmmFeed::kAsync);
  EXPECT_EQ(feed_of(8, true), BmmFeed::kTma);
  EXPECT_EQ(feed_of(72, false), BmmFeed::kAsync);
  EXPECT_EQ(feed_of(16, true), BmmFeed::kTma);
  EXPECT_EQ(feed_of(24, true), BmmFeed::kAsync);
  EXPECT_EQ(feed_of(128, true), BmmFeed::kTma);
}

TEST(BmmCudaConfig, ResultsLeaveThroughTheCopyEngineWhereTheyAreWholeRows) {
  const auto store_of = [](int p, int n) {
    return select_bmm_cuda_config(make_params({.p = p, .n = n}), kHopper).store;
  };
  for (const int n : {8, 16, 32, 64, 128}) EXPECT_EQ(store_of(40, n), BmmStore::kTma) << n;
  EXPECT_EQ(store_of(33, 64), BmmStore::kTma);
  EXPECT_EQ(store_of(33, 32), BmmStore::kVectors);
  EXPECT_EQ(store_of(34, 32), BmmStore::kTma);
  EXPECT_EQ(store_of(36, 8), BmmStore::kVectors);
  EXPECT_EQ(store_of(64, 24), BmmStore::kVectors);
  EXPECT_EQ(store_of(64, 72), BmmStore::kVectors);
}

TEST(BmmCudaConfig, OneColumnIsStoredAlongP) {
  for (const bool transpose_b : {false, true}) {
    const Sizes sizes{.p = 200, .r = 64, .n = 1, .transpose_b = transpose_b};
    BmmParams params = make_params(sizes);
    EXPECT_EQ(chosen(params),
              "bmm_sm90<tile_p=64,a=r,b=r,feed=async,store=along_p,users=4,stages=16>");
    params.p = 204;
    EXPECT_EQ(chosen(params), "bmm_mma");
    params = make_params(sizes);
    params.stride_b_r = 8;  // not contiguous
    EXPECT_EQ(chosen(params), "bmm_mma");
  }
}

TEST(BmmCudaConfig, TransposesAreReadOffTheStrides) {
  EXPECT_EQ(chosen_for({.n = 64, .transpose_a = true}),
            "bmm_sm90<tile_p=256,a=p,b=n,feed=tma,store=tma,users=2,stages=6>");
  EXPECT_EQ(chosen_for({.n = 64, .transpose_b = true}),
            "bmm_sm90<tile_p=256,a=r,b=r,feed=tma,store=tma,users=2,stages=6>");
}

TEST(BmmCudaConfig, EverythingElseIsGenericOrComposed) {
  const auto with = [](auto change, const DeviceLimits& limits = kHopper) {
    BmmParams params = make_params({});
    change(params);
    return chosen(params, limits);
  };
  EXPECT_EQ(with([](auto&) {}, kAmpere), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.dtype = DType::kFloat32; }), "bmm_simt");
  EXPECT_EQ(with([](auto& p) { p.dtype = DType::kFloat32; }, kAmpere), "bmm_simt");
  EXPECT_EQ(with([](auto& p) { p.dtype = DType::kFloat64; }), "composite");
  EXPECT_EQ(with([](auto&) {}, {.compute_capability = 75, .num_sms = 40}), "composite");
  EXPECT_EQ(with([](auto& p) { p.num_candidates = 1 << 27; }), "composite");
  EXPECT_EQ(with([](auto& p) { p.n = 31; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.r = 0; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.a_user = memory + 2; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.out = memory + 2; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.stride_a_p = 132; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.stride_a_u = 0; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.stride_b_b += 4; }), "bmm_mma");
  EXPECT_EQ(with([](auto& p) { p.stride_b_n = 2; }), "bmm_mma");
}

TEST(BmmCudaConfig, HopperCountsItsTilesIn32Bits) {
  constexpr int kMany = 1 << 27;  // users with one candidate of 8 columns each: a tile a user
  EXPECT_EQ(chosen_for({.p = 256, .r = 16, .n = 8, .num_candidates = kMany, .num_users = kMany})
                .substr(0, 8),
            "bmm_sm90");
  const std::string other =
      chosen_for({.p = 4096, .r = 16, .n = 8, .num_candidates = kMany, .num_users = kMany});
  EXPECT_EQ(other.find("bmm_sm90"), std::string::npos) << other;
}

TEST(BmmCudaConfig, NoChoiceNeedsMoreSharedMemoryThanThereIs) {
  for (const int p : {1, 64, 100, 192, 300, 5000}) {
    for (const int r : {8, 64, 136, 320, 512, 768, 1024, 5000}) {
      for (const int num_users : {1, 5000}) {
        const BmmCudaConfig config =
            select_bmm_cuda_config(make_params({.p = p, .r = r, .num_users = num_users}), kHopper);
        ASSERT_EQ(config.kernel, BmmKernel::kSm90) << p << " " << r;
        EXPECT_GE(config.user_slots, 1);
        EXPECT_LE(config.user_slots, bmm_impl::kMaxUserSlots);
        EXPECT_LE(config.stages, bmm_impl::kMaxStages);
        EXPECT_TRUE(!config.streams_user || config.stages % bmm_impl::kConsumers == 0);
        EXPECT_LE(bmm_impl::shared_bytes(config, bmm_impl::blocks_of(r)),
                  bmm_impl::kMaxSharedBytes);
      }
    }
  }
}

TEST(BmmCudaConfig, WorkspaceHoldsATileForEveryUserWithCandidates) {
  BmmParams params = make_params({.n = 24, .num_candidates = 100, .num_users = 4});
  EXPECT_EQ(bmm_impl::max_tiles(params), 2400 / 64 + 4);
  params.num_users = 1000;
  EXPECT_EQ(bmm_impl::max_tiles(params), 2400 / 64 + 100);
  EXPECT_EQ(bmm_workspace_bytes(params, {}), 0U);
  EXPECT_GE(bmm_workspace_bytes(params, select_bmm_cuda_config(params, kHopper)),
            sizeof(bmm_impl::Tile) * 137 + 4 * (3 * 1000 + 100));
}

}  // namespace
}  // namespace ikbo
