// SPDX-License-Identifier: Apache-2.0
// Sizes shared by the choice and the launch of the expand kernel.
#pragma once

namespace ikbo::expand_impl {

inline constexpr int kThreads = 256;
inline constexpr int kUnroll = 4;  // vectors that a thread has in flight

}  // namespace ikbo::expand_impl
