// SPDX-License-Identifier: Apache-2.0
// A build with IKBO_CHECK_INDICES: the first index out of range is reported and ends the stream.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_memory.h"
#include "ikbo/error.h"
#include "ikbo/expand.h"

namespace ikbo::test {
namespace {

constexpr int kUsers = 3;
constexpr int kCandidates = 5000;
constexpr const char* kReport =
    "ikbo::expand: cand_to_user values must be in [0, U) with U = 3; got cand_to_user[4321] = -7";

struct Call {
  GuardedBuffer x{kUsers * 4};
  GuardedBuffer index{kCandidates * 4};
  GuardedBuffer out{kCandidates * 4};

  void run(const std::vector<std::int32_t>& host_index) const {
    IKBO_CUDA_CHECK(
        cudaMemcpy(index.data(), host_index.data(), index.bytes(), cudaMemcpyHostToDevice),
        "index");
    const ExpandParams params{.num_users = kUsers,
                              .num_candidates = kCandidates,
                              .row_bytes = 4,
                              .user_stride = 4,
                              .x_user = x.data(),
                              .cand_to_user = index.data<std::int32_t>(),
                              .out = out.data()};
    expand(params, select_expand_config(params), nullptr);
  }
};

// One test: the trap ends the CUDA context of the process.
TEST(IndexCheck, ReportsTheFirstBadRowAndStopsTheStream) {
  const Call call;
  std::vector<std::int32_t> index(kCandidates, kUsers - 1);
  call.run(index);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  index[4321] = -7;
  index[4999] = kUsers;
  testing::internal::CaptureStderr();
  call.run(index);
  EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), std::string(kReport) + "\n");

  const ExpandParams params{.num_users = kUsers,
                            .num_candidates = kCandidates,
                            .row_bytes = 4,
                            .user_stride = 4,
                            .x_user = call.x.data(),
                            .cand_to_user = call.index.data<std::int32_t>(),
                            .out = call.out.data()};
  try {
    expand(params, select_expand_config(params), nullptr);
    FAIL() << "the next call must throw";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind(kReport, 0), 0u) << error.what();
  }
}

}  // namespace
}  // namespace ikbo::test
