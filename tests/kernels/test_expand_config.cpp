// SPDX-License-Identifier: Apache-2.0
// Which accesses and how many threads ikbo::expand takes for a row.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "ikbo/expand.h"

namespace ikbo {
namespace {

ExpandConfig select(std::uintptr_t address, std::int64_t row_bytes, std::int64_t user_stride) {
  // Addresses that are never read.
  return select_expand_config({.num_users = 4,
                               .num_candidates = 100,
                               .row_bytes = row_bytes,
                               .user_stride = user_stride,
                               .x_user = reinterpret_cast<const void*>(address),
                               .out = reinterpret_cast<void*>(std::uintptr_t{4096})});
}

TEST(ExpandConfig, AccessesAreAsWideAsRowStrideAndAddressAllow) {
  EXPECT_EQ(to_string(select(4096, 512, 512)), "expand_gather<bytes=16>");
  EXPECT_EQ(select(4096 + 8, 512, 512).vector_bytes, 8);
  EXPECT_EQ(select(4096, 512, 516).vector_bytes, 4);
  EXPECT_EQ(select(4096, 866, 866).vector_bytes, 2);
  EXPECT_EQ(select(4096, 866, 880).vector_bytes, 2);
  EXPECT_EQ(select(4096, 867, 867).vector_bytes, 1);
  EXPECT_EQ(select(4096, 4096, 0).vector_bytes, 16);  // one row for all users
}

TEST(ExpandConfig, ThreadsFollowTheRow) {
  EXPECT_EQ(select(4096, 4, 4).threads_per_row, 1);
  EXPECT_EQ(select(4096, 5 * 16, 5 * 16).threads_per_row, 8);
  EXPECT_EQ(select(4096, 32 * 16, 32 * 16).threads_per_row, 8);
  EXPECT_EQ(select(4096, 33 * 16, 33 * 16).threads_per_row, 16);
  EXPECT_EQ(select(4096, 1 << 20, 1 << 20).threads_per_row, 256);
}

}  // namespace
}  // namespace ikbo
