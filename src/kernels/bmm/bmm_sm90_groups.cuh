// SPDX-License-Identifier: Apache-2.0
// Groups the candidates by user in the shared memory of each CTA: a few microseconds less than a
// kernel ahead that all CTAs wait for.
#pragma once

#include "kernels/bmm/bmm_sm90_cta.cuh"
#include "kernels/device/cta_group_tiles.cuh"
#include "kernels/device/cta_groups.cuh"
#include "kernels/device/ptx_l2.cuh"
#include "kernels/device/ptx_tma.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
struct Sm90Groups {
  static constexpr int kNumThreads = Traits::kNumThreads;
  using Groups = device::CtaGroups<kNumThreads>;

  // Lies where the user matrices, stages and staging do, until the first load.
  struct Scratch {
    typename Groups::Scratch groups;
    alignas(8) std::uint16_t cands[device::kMaxCandsOfCta];  // user by user
    std::uint16_t first_cands[device::kMaxUsersOfCta + 1];   // of each user
    int first_tiles[device::kMaxUsersOfCta];
    int num_tiles;
  };
  // Of a tensor that a CTA asks L2 for: while candidates are grouped, memory would be idle.
  static constexpr int kBytesAhead = 32 * 1024;
  static_assert(sizeof(Scratch) <= Traits::kUserBlockBytes + kLeastStages * kStageBytes +
                                       kConsumers * kStagingBuffers * kStagingBytes);

  // By all threads of the CTA, before its first barrier.
  __device__ __forceinline__ static void begin(const Sm90Cta<Traits>& cta, unsigned char* s_raw) {
    const Sm90Args& a = cta.params.args;
    groups_of(s_raw, own_list(cta, s_raw), a.cand_to_user, a.num_users, a.num_candidates).begin();
  }

  // By all threads of the CTA, after its first barrier.
  __device__ __forceinline__ static TileList group(const Sm90Cta<Traits>& cta,
                                                   unsigned char* s_raw) {
    const Sm90Args& a = cta.params.args;
    ask_ahead(a.a_ahead);
    ask_ahead(a.b_ahead);
    return list_tiles(a.cand_to_user, a.num_users, a.num_candidates, a.n, a.divide_by_n,
                      a.num_tiles_p, a.divide_by_ctas, a.tiles, a.grouped_cands,
                      own_list(cta, s_raw));
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ static OwnList& own_list(const Sm90Cta<Traits>& cta,
                                                      unsigned char* s_raw) {
    return *reinterpret_cast<OwnList*>(s_raw + (cta.own_list() - cta.s_base));
  }
  __device__ __forceinline__ static Groups groups_of(unsigned char* s_raw, OwnList& own,
                                                     const std::int32_t* cand_to_user,
                                                     int num_users, int num_candidates) {
    return {.scratch = reinterpret_cast<Scratch*>(s_raw)->groups,
            .loaded = own.users_loaded,
            .cand_to_user = cand_to_user,
            .num_users = num_users,
            .num_candidates = num_candidates};
  }

  // Lines of this CTA's slice.
  __device__ __forceinline__ static void ask_ahead(const Ahead& ahead) {
    constexpr int kLine = 128;
    const std::int64_t slice = ahead.bytes / static_cast<int>(gridDim.x) / kLine * kLine;
    const auto* first = static_cast<const unsigned char*>(ahead.data) + slice * blockIdx.x;
    const int bytes = slice < kBytesAhead ? static_cast<int>(slice) : kBytesAhead;
#pragma unroll 1
    for (int at = thread() * kLine; at < bytes; at += kNumThreads * kLine) {
      device::prefetch_l2(first + at);
    }
  }

  // Lists the tiles of this CTA and their candidates: in its shared memory, or where they do not
  // fit in the list of all CTAs, where those that have a tile or a candidate in common write the
  // same.
  // NOTE: inlined, its branches could make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp. Arguments go by value: the kernel's own, read through
  // an address, come from far.
  __device__ __noinline__ static TileList list_tiles(
      const std::int32_t* cand_to_user, int num_users, int num_candidates, int n,
      device::FastDivide divide_by_n, int num_tiles_p, device::FastDivide divide_by_ctas,
      Tile* all_tiles, std::int32_t* all_cands, OwnList& own) {
    extern __shared__ __align__(1024) unsigned char s_raw[];
    auto& lists = *reinterpret_cast<Scratch*>(s_raw);
    const Groups groups = groups_of(s_raw, own, cand_to_user, num_users, num_candidates);
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
    const int most_cands = count * (kTileColumns / n + 2);
    const bool wraps = share.index + count > num_tiles;
    const bool is_own = !wraps && count <= kOwnTiles && most_cands <= kOwnCands;
    Tile* tiles = all_tiles;
    if (is_own) tiles = own.tiles - share.index;
#pragma unroll 1
    for (int i = thread(); i < count; i += kNumThreads) {
      const int index = share.index + i - (share.index + i >= num_tiles ? num_tiles : 0);
      tiles[index] = tile_at(lists, index, num_users, n);
    }
    std::int32_t* cands = all_cands;
    int first_cand = 0;
    int end_cand = count > 0 ? num_candidates : 0;
    if (is_own && count > 0) {
      __syncthreads();
      const auto cand_at = [&](const Tile& tile, int column) {
        return tile.first_cand + divide_by_n(tile.first_column + column);
      };
      const Tile& last = own.tiles[count - 1];
      first_cand = cand_at(own.tiles[0], 0);
      end_cand = cand_at(last, last.num_columns - 1) + 1;
      cands = own.cands - first_cand;
    }
#pragma unroll 1
    for (int c = first_cand + thread(); c < end_cand; c += kNumThreads) cands[c] = lists.cands[c];
    device::fence_smem_to_async();
    __syncthreads();
    return {tiles, cands, num_tiles};
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
