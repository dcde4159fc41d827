// SPDX-License-Identifier: Apache-2.0
// What the host knows of the grouping of candidates by user (candidate_groups.cuh).
#pragma once

#include <cstdint>

namespace ikbo::device {

inline constexpr int kGroupThreads = 1024;
inline constexpr int kGroupArrays = 3;  // int32 [U] each, of scratch in the workspace
// Their scratch fits into the shared memory of every architecture since sm_80 (99 KB on sm_86).
inline constexpr int kMaxUsersInShared = 8192;

// Bytes of dynamic shared memory of a CTA that calls group_candidates: the scratch, where it fits.
inline constexpr int group_shared_bytes(int num_users) {
  return num_users <= kMaxUsersInShared
             ? kGroupArrays * num_users * static_cast<int>(sizeof(std::int32_t))
             : 0;
}

}  // namespace ikbo::device
