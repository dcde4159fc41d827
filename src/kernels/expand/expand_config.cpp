// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstdint>

#include "ikbo/expand.h"
#include "kernels/expand/expand_layout.h"

namespace ikbo {

std::string to_string(const ExpandConfig& config) {
  return "expand_gather<bytes=" + std::to_string(config.vector_bytes) + ">";
}

ExpandConfig select_expand_config(const ExpandParams& params) {
  // The lowest bit set anywhere is the alignment that all rows share.
  const auto bits = reinterpret_cast<std::uintptr_t>(params.x_user) |
                    reinterpret_cast<std::uintptr_t>(params.out) |
                    static_cast<std::uintptr_t>(params.row_bytes | params.user_stride) | 16;
  ExpandConfig config{.vector_bytes = static_cast<int>(bits & (~bits + 1))};
  const std::int64_t vectors = params.row_bytes / config.vector_bytes;
  // Rows of up to 8 vectors have a thread for each: a row's first access is one full sector. Longer
  // ones have a thread for kUnroll.
  const std::int64_t wanted = std::max(std::min<std::int64_t>(vectors, 8),
                                       (vectors + expand_impl::kUnroll - 1) / expand_impl::kUnroll);
  config.threads_per_row = static_cast<int>(std::bit_ceil(
      static_cast<std::uint64_t>(std::clamp<std::int64_t>(wanted, 1, expand_impl::kThreads))));
  return config;
}

}  // namespace ikbo
