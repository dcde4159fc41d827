// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user in the shared memory of each CTA: a few microseconds less than a
// kernel ahead that all CTAs wait for.
#pragma once

#include "kernels/bmm/bmm_sm90_cta.cuh"
#include "kernels/device/cta_group_tiles.cuh"
#include "kernels/device/cta_groups.cuh"
#include "kernels/device/ptx_tma.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
struct Sm90Groups {
  static constexpr int kNumThreads = Traits::kNumThreads;
  using Groups = device::CtaGroups<kNumThreads>;

  // Lies where the user matrices, stages and staging do, until the first load.
  struct Scratch {
    typename Groups::Scratch groups;
    std::uint16_t cands[device::kMaxCandsOfCta];            // user by user
    std::uint16_t first_cands[device::kMaxUsersOfCta + 1];  // of each user
    int first_tiles[device::kMaxUsersOfCta];
    int num_tiles;
  };
  static_assert(sizeof(Scratch) <= Traits::kUserBlockBytes + kLeastStages * kStageBytes +
                                       kConsumers * kStagingBuffers * kStagingBytes);

  // By all threads of the CTA, before its first barrier.
  __device__ __forceinline__ static void begin(const Sm90Args& a, Scratch& s_scratch) {
    groups_of(s_scratch, a.cand_to_user, a.num_users, a.num_candidates).clear();
  }

  // By all threads of the CTA, after its first barrier.
  __device__ __forceinline__ static void group(const Sm90Args& a) {
    list_tiles(a.cand_to_user, a.num_users, a.num_candidates, a.n, a.divide_by_n, a.num_tiles_p,
               a.divide_by_ctas, a.num_tiles, a.tiles, a.grouped_cands);
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ static Groups groups_of(Scratch& scratch,
                                                     const std::int32_t* cand_to_user,
                                                     int num_users, int num_candidates) {
    return {.scratch = scratch.groups,
            .cand_to_user = cand_to_user,
            .num_users = num_users,
            .num_candidates = num_candidates};
  }

  // Writes what this CTA reads again: its tiles and their candidates, a warp a tile. CTAs that have
  // a tile or a candidate in common write the same.
  // NOTE: inlined, its branches could make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp. Arguments go by value: the kernel's own, read through
  // an address, come from far.
  __device__ __noinline__ static void list_tiles(const std::int32_t* cand_to_user, int num_users,
                                                 int num_candidates, int n,
                                                 device::FastDivide divide_by_n, int num_tiles_p,
                                                 device::FastDivide divide_by_ctas,
                                                 std::int32_t* num_tiles_out, Tile* tiles,
                                                 std::int32_t* grouped_cands) {
    extern __shared__ __align__(1024) unsigned char s_raw[];
    auto& lists = *reinterpret_cast<Scratch*>(s_raw);
    const Groups groups = groups_of(lists, cand_to_user, num_users, num_candidates);
    const bool is_sorted = groups.count(nullptr, nullptr, lists.cands);
    if (thread() < 32) {
      device::place_tiles(
          num_users, [&](int u) { return groups.count_of(u); }, [](int i) { return i; },
          [&](int candidates) { return (candidates * n + kTileColumns - 1) / kTileColumns; },
          lists.first_cands, lists.first_tiles, lists.num_tiles);
    }
    if (!is_sorted) {
      __syncthreads();
      groups.list(lists.first_cands, lists.cands);
    }
    __syncthreads();
    const int num_tiles = lists.num_tiles;
    const auto share = Sm90Cta<Traits>::share_of_cta(num_tiles, num_tiles_p, divide_by_ctas);
    const int count = min(share.count, num_tiles);
    const int lane = thread() % 32;
    if (thread() == 0) *num_tiles_out = num_tiles;
#pragma unroll 1
    for (int i = thread() / 32; i < count; i += kNumThreads / 32) {
      const int index = share.index + i - (share.index + i >= num_tiles ? num_tiles : 0);
      const Tile tile = tile_at(lists, index, num_users, n);
      if (lane == 0) tiles[index] = tile;
      const int first = tile.first_cand + divide_by_n(tile.first_column);
      const int last = tile.first_cand + divide_by_n(tile.first_column + tile.num_columns - 1);
#pragma unroll 1
      for (int c = first + lane; c <= last; c += 32) grouped_cands[c] = lists.cands[c];
    }
    device::fence_smem_to_async();
    __syncthreads();
  }

  __device__ __forceinline__ static Tile tile_at(const Scratch& lists, int index, int num_users,
                                                 int n) {
    const int user = device::last_not_above(lists.first_tiles, num_users, index);
    const int first_cand = lists.first_cands[user];
    const int first_column = (index - lists.first_tiles[user]) * kTileColumns;
    const int columns = (lists.first_cands[user + 1] - first_cand) * n;
    return {.user = user,
            .first_cand = first_cand,
            .first_column = first_column,
            .num_columns = min(columns - first_column, kTileColumns)};
  }
};

}  // namespace ikbo::bmm_impl
