// SPDX-License-Identifier: Apache-2.0
#include "cpu/user_rows.h"

#include <algorithm>
#include <cstring>

namespace ikbo::cpu {
namespace {

// Bytes that one thread should at least copy: below, starting threads costs more than it saves.
constexpr int64_t kGrainBytes = 64 * 1024;

}  // namespace

Tensor checked_index(const char* op, const Tensor& cand_to_user, int64_t num_users) {
  const Tensor index = torch::stable::contiguous(cand_to_user);
  const int64_t count = index.numel();
  const int32_t* values = index.const_data_ptr<int32_t>();
  int32_t lowest = 0;
  int32_t highest = -1;
  for (int64_t b = 0; b < count; ++b) {
    lowest = std::min(lowest, values[b]);
    highest = std::max(highest, values[b]);
  }
  if (lowest >= 0 && highest < num_users) {
    return index;
  }
  const int32_t* bad = std::find_if(values, values + count,
                                    [=](int32_t value) { return value < 0 || value >= num_users; });
  STD_TORCH_CHECK(false, "ikbo::", op,
                  ": cand_to_user values must be in [0, U) with U = ", num_users,
                  "; got cand_to_user[", bad - values, "] = ", *bad);
}

void gather_user_rows(const Tensor& dst, const Tensor& src, const Tensor& cand_to_user) {
  const int64_t count = dst.size(0);
  if (dst.numel() == 0) {
    return;
  }
  const auto element_bytes = static_cast<int64_t>(dst.element_size());
  const int64_t row_bytes = dst.numel() / count * element_bytes;
  const int64_t src_stride_bytes = src.stride(0) * element_bytes;
  auto* to = static_cast<char*>(dst.mutable_data_ptr());
  const auto* from = static_cast<const char*>(src.const_data_ptr());
  const int32_t* index = cand_to_user.const_data_ptr<int32_t>();
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes));
  torch::stable::parallel_for(0, count, grain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      std::memcpy(to + b * row_bytes, from + index[b] * src_stride_bytes, row_bytes);
    }
  });
}

}  // namespace ikbo::cpu
