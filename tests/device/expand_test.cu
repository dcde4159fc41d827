// SPDX-License-Identifier: Apache-2.0
// ikbo::expand on a GPU, byte for byte: every alignment, short and long rows, rows with a gap.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_memory.h"
#include "ikbo/expand.h"

namespace ikbo::test {
namespace {

struct ExpandCase {
  int num_users;
  int num_candidates;
  std::int64_t row_bytes;
  std::int64_t gap = 0;    // bytes between two rows
  std::int64_t shift = 0;  // bytes before the first
  int vector_bytes = 1;    // that the choice must come to

  std::string id() const {
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_row" +
           std::to_string(row_bytes) + "_gap" + std::to_string(gap) + "_shift" +
           std::to_string(shift);
  }
};

__host__ __device__ std::uint8_t byte_of(std::int64_t user, std::int64_t at) {
  return static_cast<std::uint8_t>((user * 1000003 + at * 31 + at / 251) % 253);
}

__global__ void fill_kernel(std::uint8_t* x, ExpandParams p) {
  const std::int64_t count = p.num_users * p.row_bytes;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t user = i / p.row_bytes;
    x[user * p.user_stride + i % p.row_bytes] = byte_of(user, i % p.row_bytes);
  }
}

__global__ void compare_kernel(ExpandParams p, unsigned long long* first_bad) {
  const std::int64_t count = p.num_candidates * p.row_bytes;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t user = p.cand_to_user[i / p.row_bytes];
    if (static_cast<const std::uint8_t*>(p.out)[i] != byte_of(user, i % p.row_bytes)) {
      atomicMin(first_bad, static_cast<unsigned long long>(i));
    }
  }
}

class ExpandTest : public testing::TestWithParam<ExpandCase> {};

TEST_P(ExpandTest, CopiesEveryByte) {
  const ExpandCase& c = GetParam();
  const std::int64_t stride = c.row_bytes + c.gap;
  const GuardedBuffer x(static_cast<std::size_t>(c.num_users * stride + c.shift));
  const GuardedBuffer index(static_cast<std::size_t>(c.num_candidates) * sizeof(std::int32_t));
  const GuardedBuffer out(static_cast<std::size_t>(c.num_candidates * c.row_bytes));
  std::vector<std::int32_t> host_index;
  for (int b = 0; b < c.num_candidates; ++b) {
    host_index.push_back(static_cast<std::int32_t>(b * 2654435761u % unsigned(c.num_users)));
  }
  ASSERT_EQ(cudaMemcpy(index.data(), host_index.data(), index.bytes(), cudaMemcpyHostToDevice),
            cudaSuccess);
  auto* rows = x.data<std::uint8_t>() + c.shift;
  const ExpandParams params{.num_users = c.num_users,
                            .num_candidates = c.num_candidates,
                            .row_bytes = c.row_bytes,
                            .user_stride = stride,
                            .x_user = rows,
                            .cand_to_user = index.data<std::int32_t>(),
                            .out = out.data()};
  fill_kernel<<<512, 256>>>(rows, params);
  const ExpandConfig config = select_expand_config(params);
  EXPECT_EQ(config.vector_bytes, c.vector_bytes);
  expand(params, config, nullptr);

  const GuardedBuffer first_bad(sizeof(unsigned long long));
  compare_kernel<<<2048, 256>>>(params, first_bad.data<unsigned long long>());
  long long bad = 0;
  ASSERT_EQ(cudaMemcpy(&bad, first_bad.data(), sizeof(bad), cudaMemcpyDeviceToHost), cudaSuccess)
      << to_string(config);
  EXPECT_EQ(bad, -1) << to_string(config) << ": first wrong byte of out";
  EXPECT_TRUE(out.guards_are_intact()) << to_string(config);
}

std::string name_of_case(const testing::TestParamInfo<ExpandCase>& info) { return info.param.id(); }

constexpr ExpandCase kSmall[] = {
    {.num_users = 1, .num_candidates = 1, .row_bytes = 1},
    {.num_users = 3, .num_candidates = 1000, .row_bytes = 4, .vector_bytes = 4},
    {.num_users = 3, .num_candidates = 300, .row_bytes = 512, .vector_bytes = 16},
    {.num_users = 3, .num_candidates = 300, .row_bytes = 512, .shift = 2, .vector_bytes = 2},
    {.num_users = 3, .num_candidates = 300, .row_bytes = 512, .gap = 8, .vector_bytes = 8},
    {.num_users = 3, .num_candidates = 300, .row_bytes = 512, .gap = 4, .vector_bytes = 4},
    {.num_users = 5, .num_candidates = 77, .row_bytes = 866, .vector_bytes = 2},
    {.num_users = 5, .num_candidates = 77, .row_bytes = 867, .gap = 1, .vector_bytes = 1},
    {.num_users = 2, .num_candidates = 3, .row_bytes = 100004, .vector_bytes = 4}};

// The last: offsets past 2^32 bytes in both tensors.
constexpr ExpandCase kLarge[] = {
    {.num_users = 70, .num_candidates = 100000, .row_bytes = 16, .vector_bytes = 16},
    {.num_users = 3000, .num_candidates = 3000, .row_bytes = 2000016, .vector_bytes = 16}};

INSTANTIATE_TEST_SUITE_P(Small, ExpandTest, testing::ValuesIn(kSmall), name_of_case);
INSTANTIATE_TEST_SUITE_P(Large, ExpandTest, testing::ValuesIn(kLarge), name_of_case);

}  // namespace
}  // namespace ikbo::test
