// SPDX-License-Identifier: Apache-2.0
// A build with IKBO_CHECK_INDICES: the first index out of range is reported and ends the stream.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device_memory.h"
#include "ikbo/error.h"
#include "ikbo/expand.h"
#include "ikbo/lce.h"
#include "ikbo/linear.h"

namespace ikbo::test {
namespace {

constexpr int kUsers = 3;
constexpr int kCandidates = 5000;
constexpr int kBadRow = 4321;
constexpr int kM = 16;
constexpr int kN = 8;
constexpr int kK = 24;

// Device memory of one call; zeros, so that a call with a good index computes something.
using Buffers = std::vector<std::unique_ptr<GuardedBuffer>>;
void* zeros(Buffers& buffers, std::size_t bytes) {
  buffers.push_back(std::make_unique<GuardedBuffer>(bytes));
  IKBO_CUDA_CHECK(cudaMemset(buffers.back()->data(), 0, bytes), "operand");
  return buffers.back()->data();
}

using Launch = std::function<void()>;
using MakeLaunch = Launch (*)(Buffers& buffers, const std::int32_t* index);

Launch make_expand(Buffers& buffers, const std::int32_t* index) {
  const ExpandParams params{.num_users = kUsers,
                            .num_candidates = kCandidates,
                            .row_bytes = 4,
                            .user_stride = 4,
                            .x_user = zeros(buffers, kUsers * 4),
                            .cand_to_user = index,
                            .out = zeros(buffers, kCandidates * 4)};
  return [params] { expand(params, select_expand_config(params), nullptr); };
}

// The kernel that the device gets for `dtype`: Hopper's for 16-bit types, the generic one for fp32.
template <DType kDtype>
Launch make_lce(Buffers& buffers, const std::int32_t* index) {
  constexpr std::size_t kSize = size_of(kDtype);
  LceParams params{.num_users = kUsers,
                   .num_candidates = kCandidates,
                   .m = kM,
                   .n = kN,
                   .k_user = kK,
                   .k_cand = kK,
                   .dtype = kDtype,
                   .e_user = zeros(buffers, kUsers * kK * kN * kSize),
                   .e_cand = zeros(buffers, kCandidates * kK * kN * kSize),
                   .w_user = zeros(buffers, kM * kK * kSize),
                   .w_cand = zeros(buffers, kM * kK * kSize),
                   .cand_to_user = index,
                   .out = zeros(buffers, kCandidates * kM * kN * kSize),
                   .stride_e_user_u = kK * kN,
                   .stride_e_user_k = kN,
                   .stride_e_cand_b = kK * kN,
                   .stride_e_cand_k = kN,
                   .stride_w_user_m = kK,
                   .stride_w_cand_m = kK};
  const DeviceLimits limits = query_device_limits(0);
  const LceConfig config = select_lce_config(params, limits);
  params.workspace = zeros(buffers, lce_workspace_bytes(params, config));
  return [=] { lce(params, config, limits, nullptr); };
}

template <DType kDtype>
Launch make_linear(Buffers& buffers, const std::int32_t* index) {
  constexpr std::size_t kSize = size_of(kDtype);
  LinearParams params{.num_users = kUsers,
                      .num_candidates = kCandidates,
                      .m = kM,
                      .k_user = kK,
                      .k_cand = kK,
                      .dtype = kDtype,
                      .x_user = zeros(buffers, kUsers * kK * kSize),
                      .x_cand = zeros(buffers, kCandidates * kK * kSize),
                      .w_user = zeros(buffers, kM * kK * kSize),
                      .w_cand = zeros(buffers, kM * kK * kSize),
                      .cand_to_user = index,
                      .out = zeros(buffers, kCandidates * kM * kSize),
                      .stride_x_user_u = kK,
                      .stride_x_cand_b = kK,
                      .stride_w_user_m = kK,
                      .stride_w_cand_m = kK};
  const DeviceLimits limits = query_device_limits(0);
  const LinearConfig config = select_linear_config(params, limits);
  params.workspace = zeros(buffers, linear_workspace_bytes(params, config));
  return [=] { linear(params, config, limits, nullptr); };
}

struct CheckedCall {
  const char* name;
  const char* op;
  MakeLaunch make;
};

std::string report_of(const char* op, int row, int value) {
  return std::string("ikbo::") + op +
         ": cand_to_user values must be in [0, U) with U = " + std::to_string(kUsers) +
         "; got cand_to_user[" + std::to_string(row) + "] = " + std::to_string(value);
}

// A regular expression that matches `text` alone.
std::string literally(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    if (std::string("[().*+?^$|\\{").find(c) != std::string::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

// Ends the process: with 0 where the last of three calls, with `bad` at kBadRow and another bad
// value behind it, does what a checked build must do.
void call_and_exit(const CheckedCall& call, int bad) {
  const auto require = [](bool condition, const std::string& what) {
    if (condition) return;
    std::fprintf(stderr, "%s\n", what.c_str());
    std::_Exit(1);
  };
  Buffers buffers;
  std::vector<std::int32_t> index(kCandidates, kUsers - 1);
  index[0] = 0;
  auto* g_index = static_cast<std::int32_t*>(zeros(buffers, kCandidates * 4));
  const auto set_index = [&] {
    IKBO_CUDA_CHECK(cudaMemcpy(g_index, index.data(), kCandidates * 4, cudaMemcpyHostToDevice),
                    "index");
  };
  const Launch launch = call.make(buffers, g_index);
  set_index();
  launch();
  const cudaError_t good = cudaDeviceSynchronize();
  require(good == cudaSuccess, std::string("a good index: ") + cudaGetErrorString(good));

  index[kBadRow] = bad;
  index[kCandidates - 1] = kUsers + 5;
  set_index();
  launch();
  require(cudaDeviceSynchronize() != cudaSuccess, "the stream goes on");

  const std::string report = report_of(call.op, kBadRow, bad);
  try {
    launch();
    require(false, "the next call does not throw");
  } catch (const Error& error) {
    require(std::string(error.what()).rfind(report, 0) == 0,
            std::string("the next call throws: ") + error.what());
  }
  std::_Exit(0);
}

// The trap ends the CUDA context of a process: each case has a process of its own, and this one
// never starts CUDA.
class IndexCheckDeathTest : public testing::TestWithParam<CheckedCall> {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_P(IndexCheckDeathTest, ReportsTheFirstBadRowAndStopsTheStream) {
  for (const int bad : {-7, kUsers}) {
    EXPECT_EXIT(call_and_exit(GetParam(), bad), testing::ExitedWithCode(0),
                "^" + literally(report_of(GetParam().op, kBadRow, bad)) + "\n$");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, IndexCheckDeathTest,
    testing::Values(CheckedCall{"expand", "expand", make_expand},
                    CheckedCall{"lce_float16", "lce", make_lce<DType::kFloat16>},
                    CheckedCall{"lce_bfloat16", "lce", make_lce<DType::kBFloat16>},
                    CheckedCall{"lce_float32", "lce", make_lce<DType::kFloat32>},
                    CheckedCall{"linear_float16", "linear", make_linear<DType::kFloat16>},
                    CheckedCall{"linear_bfloat16", "linear", make_linear<DType::kBFloat16>},
                    CheckedCall{"linear_float32", "linear", make_linear<DType::kFloat32>}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ikbo::test
