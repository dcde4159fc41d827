// SPDX-License-Identifier: Apache-2.0
// What the host knows of the grouping of candidates by user (candidate_groups.cuh, cta_groups.cuh).
#pragma once

#include <cstdint>

namespace ikbo::device {

inline constexpr int kGroupThreads = 1024;
inline constexpr int kGroupArrays = 3;  // int32 [U] each, of scratch in the workspace
// Their scratch, with an array more and a few KB of fixed size, fits into the shared memory of
// every architecture since sm_80 (99 KB on sm_86).
inline constexpr int kMaxUsersInShared = 88 * 1024 / (kGroupArrays + 1) / 4;

// Bytes of dynamic shared memory of a CTA that calls group_candidates: the scratch of so many
// arrays, where it fits. A few KB of arrays of fixed size are beside it: near the 48 KB that a
// launch has unasked, it takes more.
inline constexpr int group_shared_bytes(int num_users, int arrays = kGroupArrays) {
  constexpr int kUnasked = 48 * 1024;
  constexpr int kBeside = 8 * 1024;
  if (num_users > kMaxUsersInShared) return 0;
  const int bytes = arrays * num_users * static_cast<int>(sizeof(std::int32_t));
  return bytes > kUnasked - kBeside && bytes <= kUnasked ? kUnasked + 16 : bytes;
}

// What every CTA of a kernel has room for to group the candidates by itself.
inline constexpr int kMaxCandsOfCta = 8192;
inline constexpr int kMaxUsersOfCta = 512;

}  // namespace ikbo::device
