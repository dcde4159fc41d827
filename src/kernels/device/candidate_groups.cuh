// SPDX-License-Identifier: Apache-2.0
// Groups any number of candidates by user and cuts each user's rows into tiles, in one CTA.
#pragma once

#include <cstdint>

#include "kernels/device/block_sums.cuh"
#include "kernels/device/candidate_groups_layout.h"
#include "kernels/device/fast_divide.cuh"
#include "kernels/device/user_peers.cuh"

namespace ikbo::device {

// Rows of a full tile, and division by them.
struct TileRows {
  int count = 1;
  FastDivide divide;

  TileRows() = default;
  TileRows(int rows) : count(rows), divide(rows) {}  // NOLINT(google-explicit-constructor)
};

struct CandidateGroups {
  const std::int32_t* cand_to_user;
  int num_users;
  int num_candidates;
  int rows_of_candidate;
  TileRows tile_rows;
  std::int32_t* num_tiles;
  std::int32_t* users;          // [kGroupArrays, U] of scratch
  std::int32_t* grouped_cands;  // [B]: candidates, user by user

  __device__ __forceinline__ int tiles_of(int candidates) const {
    return tile_rows.divide(candidates * rows_of_candidate + tile_rows.count - 1);
  }
};

// Rows of one user; row r is row r % rows_of_candidate of its candidate r / rows_of_candidate.
struct UserRows {
  int user;
  int first_cand;  // position of the user's first candidate in the grouped list
  int first_row;
  int num_rows;  // at most tile_rows
};

// Calls `visit(b, user)` for all candidates, by whole warps: a user of -1 where there is none. The
// users of a few rounds are asked for together.
template <typename Visit>
__device__ __forceinline__ void visit_candidates(const std::int32_t* cand_to_user,
                                                 int num_candidates, Visit&& visit) {
  constexpr int kAtOnce = 4;
  for (int first = static_cast<int>(threadIdx.x) / 32 * 32; first < num_candidates;
       first += kAtOnce * kGroupThreads) {
    const int b = first + static_cast<int>(threadIdx.x) % 32;
    int user[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = b + i * kGroupThreads;
      user[i] = at < num_candidates ? cand_to_user[at] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kGroupThreads < num_candidates) visit(b + i * kGroupThreads, user[i]);
    }
  }
}

struct UserArrays {
  int* counts;       // candidates
  int* first_cands;  // in the grouped list
  int* first_tiles;
};

// What an operator may add to the grouping: here, nothing.
struct PlainGrouping {
  __device__ void begin(int /*user*/) const {}
  __device__ void count(int /*user*/, int /*cand*/) const {}
  __device__ void finish(int /*user*/) const {}  // all its candidates are counted
  // May number the tiles anew: those of a user follow each other. Called by all threads.
  __device__ void order(const UserArrays& /*users*/) const {}
};

// By a CTA of kGroupThreads threads. Calls `place(t, rows)` for every tile t, with the UserRows in
// it; tiles of one user follow each other.
template <typename Place, typename Grouping = PlainGrouping>
__device__ __forceinline__ void group_candidates(const CandidateGroups& groups, int* s_users,
                                                 Place&& place, const Grouping& grouping = {}) {
  using Pair = std::uint64_t;  // candidates and, in the upper half, tiles
  __shared__ Pair s_warps[kGroupThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  int* scratch = groups.num_users <= kMaxUsersInShared ? s_users : groups.users;
  const UserArrays users{scratch, scratch + groups.num_users, scratch + 2 * groups.num_users};
  for (int u = thread; u < groups.num_users; u += kGroupThreads) {
    users.counts[u] = 0;
    grouping.begin(u);
  }
  __syncthreads();
  visit_candidates(groups.cand_to_user, groups.num_candidates, [&](int b, int user) {
    const Peers peers(user);
    if (user < 0) return;
    if (peers.is_first()) atomicAdd(&users.counts[user], peers.count());
    grouping.count(user, b);
  });
  __syncthreads();
  Pair before_round = 0;
  for (int first = 0; first < groups.num_users; first += kGroupThreads) {
    const int user = first + thread;
    const int count = user < groups.num_users ? users.counts[user] : 0;
    const auto sums = sums_of_block<kGroupThreads>(
        static_cast<Pair>(groups.tiles_of(count)) << 32 | static_cast<unsigned>(count), s_warps);
    if (user < groups.num_users) {
      const Pair before = before_round + sums.before;
      users.first_cands[user] = static_cast<int>(before);
      users.first_tiles[user] = static_cast<int>(before >> 32);
      grouping.finish(user);
    }
    before_round += sums.total;
  }
  __syncthreads();
  const int num_tiles = static_cast<int>(before_round >> 32);
  if (thread == 0) *groups.num_tiles = num_tiles;
  grouping.order(users);
  // A few threads per user, where users have several tiles each.
  int shift = 0;
  while (shift < 5 && (groups.num_users << shift) < num_tiles) ++shift;
  const int threads = 1 << shift;
  for (int u = thread >> shift; u < groups.num_users; u += kGroupThreads >> shift) {
    const int rows = users.counts[u] * groups.rows_of_candidate;
    const int tiles = groups.tiles_of(users.counts[u]);
    for (int t = thread & (threads - 1); t < tiles; t += threads) {
      const int first_row = t * groups.tile_rows.count;
      place(users.first_tiles[u] + t,
            UserRows{.user = u,
                     .first_cand = users.first_cands[u],
                     .first_row = first_row,
                     .num_rows = min(rows - first_row, groups.tile_rows.count)});
    }
  }
  __syncthreads();
  // In no particular order within a user: no row's result depends on its place in a tile.
  visit_candidates(groups.cand_to_user, groups.num_candidates, [&](int b, int user) {
    const Peers peers(user);
    int first = 0;
    if (user >= 0 && peers.is_first()) first = atomicAdd(&users.first_cands[user], peers.count());
    first = peers.from_first(first);
    if (user >= 0) groups.grouped_cands[first + peers.before()] = b;
  });
}

}  // namespace ikbo::device
