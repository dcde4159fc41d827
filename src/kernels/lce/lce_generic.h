// SPDX-License-Identifier: Apache-2.0
// LCE without the instructions of one architecture: compute capability 8.0 and newer, any stride,
// alignment and size.
#pragma once

#include <cstdint>

#include "ikbo/lce.h"

namespace ikbo::lce_impl {

inline constexpr int kSmallTile = 64;
inline constexpr int kLargeTile = 128;

// Pure. lce_mma for 16-bit types, lce_simt for fp32.
LceConfig select_generic_config(const LceParams& p, const DeviceLimits& limits);

// How many 16-bit elements one copy may move along a dimension of stride `stride`, when rows of
// `row` elements start at multiples of `other_strides` from `data`: 8, 2 or 1.
int copy_width(const void* data, std::int64_t stride, std::int64_t row, std::int64_t other_stride_0,
               std::int64_t other_stride_1);

// User stage and candidate stage of `config`, which names a generic kernel; B, M and N are not 0.
void run_generic(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
                 Stream stream);

}  // namespace ikbo::lce_impl
