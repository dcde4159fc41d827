// SPDX-License-Identifier: Apache-2.0
// lce_sm90 and linear_sm90 with the fewest stages that their pipelines can run on: each slot is
// filled, used and released at every turn, so that a wait too few or too many shows. The user stage
// is the operator's own; the candidate stage after it must come to the operator's bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/lce/lce_sm90_instance.cuh"
#include "kernels/linear/linear_sm90_instance.cuh"
#include "lce_problem.cuh"
#include "linear_problem.cuh"
#include "result_differences.h"

namespace ikbo::test {
namespace {

// A stage of lce with its shared memory for kStages; kPendingBlocks as Traits::kPending.
template <typename Base, int kStages, int kPendingBlocks>
struct FewLceStages : Base {
  static constexpr int kPending = kPendingBlocks;
  static constexpr int kNumStages = kStages;
  static_assert(kStages == kPending + 2 && kStages < Base::kNumStages);
  struct SharedStorage {
    alignas(Base::kAlignment) unsigned char stages[kStages][Base::kStageBytes];
    alignas(Base::kAlignment) unsigned char staging[Base::kConsumers][Base::kStagingBytes];
    alignas(16) unsigned char partial[Base::kConsumers][std::max(Base::kPartialBytes, 1)];
    alignas(8) std::uint64_t full[kStages];
    std::uint64_t empty[kStages];
    std::uint64_t partial_full[Base::kConsumers];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
};

template <typename Element, int kTileM, lce_impl::Stage kStage, int kStages, int kPending>
using FewLce = FewLceStages<
    lce_impl::Sm90Traits<Element, kTileM, 2, kStage, kStage == lce_impl::Stage::kDual ? 2 : 1>,
    kStages, kPending>;

// The candidate stage of `Traits` on the partial and the packed weights that `run` left behind.
template <typename Traits>
std::vector<std::uint16_t> result_of_lce_stage(LceRun& run) {
  const LceParams& p = run.problem.params;
  const lce_impl::WorkspaceLayout layout = lce_impl::make_workspace_layout(p, run.config);
  auto* workspace = run.workspace->data<unsigned char>();
  run.poison();
  IKBO_CUDA_CHECK(cudaDeviceSynchronize(), "poison");
  lce_impl::launch_stage<Traits>(
      {.params = p,
       .config = run.config,
       .num_sms = run.limits.num_sms,
       .w_user_packed = workspace + layout.w_user_packed,
       .w_cand_packed = workspace + layout.w_cand_packed,
       .user_partial = reinterpret_cast<float4*>(workspace + layout.user_partial),
       .overlaps_previous = true,
       .stream = nullptr});
  return run.read_back();
}

template <typename Element, int kTileM, lce_impl::Stage kStage>
void expect_the_bits_of_lce(const LceCase& c) {
  LceRun run(c);
  ASSERT_EQ(run.config.kernel, LceKernel::kSm90) << to_string(run.config);
  ASSERT_EQ(run.config.tile_m, kTileM) << to_string(run.config);
  ASSERT_EQ(run.config.dual_k, kStage == lce_impl::Stage::kDual) << to_string(run.config);
  const std::vector<std::uint16_t> expected = run.result();
  ASSERT_EQ(wrong_elements(c, run.problem.params), "") << to_string(run.config);
  const std::size_t row_size = static_cast<std::size_t>(c.m) * c.n;
  const auto two = result_of_lce_stage<FewLce<Element, kTileM, kStage, 2, 0>>(run);
  EXPECT_EQ(first_different_element(two, expected, c.dtype, row_size), "") << "2 stages";
  const auto three = result_of_lce_stage<FewLce<Element, kTileM, kStage, 3, 1>>(run);
  EXPECT_EQ(first_different_element(three, expected, c.dtype, row_size), "") << "3 stages";
}

TEST(LcePipeline, FewestStagesGiveTheSameBits) {
  // Blocks of k: more than stages, an odd number, one.
  for (const int k_cand : {866, 65, 16}) {
    SCOPED_TRACE(k_cand);
    expect_the_bits_of_lce<__half, 224, lce_impl::Stage::kCandidate>({.num_users = 15,
                                                                      .num_candidates = 257,
                                                                      .m = 433,
                                                                      .n = 256,
                                                                      .k_user = 130,
                                                                      .k_cand = k_cand});
  }
}

TEST(LcePipeline, FewestStagesGiveTheSameBitsOverBothSides) {
  for (const int k_cand : {200, 16}) {
    SCOPED_TRACE(k_cand);
    expect_the_bits_of_lce<__nv_bfloat16, 64, lce_impl::Stage::kDual>({.num_users = 300,
                                                                       .num_candidates = 301,
                                                                       .m = 64,
                                                                       .n = 192,
                                                                       .k_user = 70,
                                                                       .k_cand = k_cand,
                                                                       .dtype = DType::kBFloat16});
  }
}

template <typename Base>
struct TwoLinearStages : Base {
  static constexpr int kNumStages = 2;
  struct SharedStorage {
    alignas(1024) unsigned char stages[kNumStages][Base::kStageBytes];
    std::uint64_t full[kNumStages];
    std::uint64_t empty[kNumStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage) + 1024;
};

template <typename Element, int kTileM, int kConsumers>
void expect_the_bits_of_linear(const LinearCase& c) {
  using Traits = TwoLinearStages<linear_impl::Sm90Traits<Element, kTileM, kConsumers>>;
  LinearRun run(c);
  const LinearParams& p = run.problem.params;
  ASSERT_EQ(run.config.kernel, LinearKernel::kSm90) << to_string(run.config);
  const std::vector<std::uint8_t> expected = run.result();
  ASSERT_EQ(wrong_elements(c, p), "") << to_string(run.config);
  run.problem.out.poison();
  IKBO_CUDA_CHECK(cudaDeviceSynchronize(), "poison");
  const linear_impl::WorkspaceLayout layout = linear_impl::make_workspace_layout(p, run.config);
  auto* workspace = run.workspace.data<unsigned char>();
  linear_impl::RowMatrix w{p.w_cand, p.stride_w_cand_m, p.m, p.k_cand, run.config.w_cand};
  if (w.feed == LinearFeed::kCopied) {
    w = {workspace + layout.w_cand_copy, linear_impl::copied_stride(p.k_cand), p.m, p.k_cand,
         LinearFeed::kTma};
  }
  linear_impl::launch_stage<Traits>(
      {.params = p,
       .stage = linear_impl::Stage::kCandidate,
       .tiling = run.config.candidate,
       .x = {p.x_cand, p.stride_x_cand_b, p.num_candidates, p.k_cand, run.config.x_cand},
       .w = w,
       .user_partial = reinterpret_cast<float*>(workspace + layout.user_partial),
       .partial_columns = linear_impl::partial_columns(p, run.config),
       .num_sms = run.limits.num_sms,
       .copies_weights = false,
       .stream = nullptr});
  EXPECT_EQ(first_different_element(run.problem.read_out(), expected, c.dtype, c.m), "")
      << to_string(run.config);
}

// Blocks of k: many, three, one.
TEST(LinearPipeline, TwoStagesGiveTheSameBits) {
  for (const int k_cand : {864, 136, 16}) {
    SCOPED_TRACE(k_cand);
    expect_the_bits_of_linear<__half, 224, 2>({.num_users = 300,
                                               .num_candidates = 40011,
                                               .m = 433,
                                               .k_user = 136,
                                               .k_cand = k_cand,
                                               .activation = Activation::kSilu,
                                               .holes = Holes::kNone,
                                               .pinned = {128, 224, 1}});
  }
}

// By the copy engine, and 866 in words of 4 bytes.
TEST(LinearPipeline, TwoStagesGiveTheSameBitsWhereCtasShareASum) {
  for (const int k_cand : {866, 840, 264}) {
    for (const int split_k : {1, 4}) {
      SCOPED_TRACE(k_cand);
      expect_the_bits_of_linear<__half, 64, 1>({.num_users = 15,
                                                .num_candidates = 700,
                                                .m = 433,
                                                .k_user = 264,
                                                .k_cand = k_cand,
                                                .holes = Holes::kNone,
                                                .pinned = {64, 64, split_k}});
    }
  }
}

}  // namespace
}  // namespace ikbo::test
