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
struct Sm90Groups : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Cta::params;
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

  // By all threads of the CTA.
  // NOTE: inlined, its branches could make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp.
  __device__ __noinline__ void group(Scratch& s_scratch) const {
    const Sm90Args& a = params.args;
    const Groups groups{.scratch = s_scratch.groups,
                        .cand_to_user = a.cand_to_user,
                        .num_users = a.num_users,
                        .num_candidates = a.num_candidates};
    groups.clear();
    __syncthreads();
    const bool is_sorted = groups.count(nullptr, nullptr, s_scratch.cands);
    if (threadIdx.x < 32) {
      device::place_tiles(
          a.num_users, [&](int u) { return groups.count_of(u); }, [](int i) { return i; },
          [&](int candidates) { return (candidates * a.n + kTileColumns - 1) / kTileColumns; },
          s_scratch.first_cands, s_scratch.first_tiles, s_scratch.num_tiles);
    }
    if (!is_sorted) {
      __syncthreads();
      groups.list(s_scratch.first_cands, s_scratch.cands);
    }
    __syncthreads();
    write_share(s_scratch);
    device::fence_smem_to_async();
    __syncthreads();
  }

 private:
  // What this CTA reads again: its tiles and their candidates, a warp a tile. CTAs that have a tile
  // or a candidate in common write the same.
  __device__ __forceinline__ void write_share(const Scratch& scratch) const {
    const Sm90Args& a = params.args;
    const int num_tiles = scratch.num_tiles;
    const auto share = Cta::share_of_cta(num_tiles, a.num_tiles_p);
    const int count = share.count < num_tiles ? static_cast<int>(share.count) : num_tiles;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) *a.num_tiles = num_tiles;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < count; i += kNumThreads / 32) {
      const int index = share.index + i - (share.index + i >= num_tiles ? num_tiles : 0);
      const Tile tile = tile_at(scratch, index);
      if (lane == 0) a.tiles[index] = tile;
      const int first = tile.first_cand + a.divide_by_n(tile.first_column);
      const int last = tile.first_cand + a.divide_by_n(tile.first_column + tile.num_columns - 1);
      for (int c = first + lane; c <= last; c += 32) a.grouped_cands[c] = scratch.cands[c];
    }
  }

  __device__ __forceinline__ Tile tile_at(const Scratch& scratch, int index) const {
    const int user = device::last_not_above(scratch.first_tiles, params.args.num_users, index);
    const int first_cand = scratch.first_cands[user];
    const int first_column = (index - scratch.first_tiles[user]) * kTileColumns;
    const int columns = (scratch.first_cands[user + 1] - first_cand) * params.args.n;
    return {.user = user,
            .first_cand = first_cand,
            .first_column = first_column,
            .num_columns = min(columns - first_column, kTileColumns)};
  }
};

}  // namespace ikbo::bmm_impl
