// SPDX-License-Identifier: Apache-2.0
// The tiles of a CTA: the producer cuts them, and tells the consumers.
#pragma once

#include "kernels/bmm/bmm_sm90_cta.cuh"
#include "kernels/device/ptx_mma.cuh"

namespace ikbo::bmm_impl {

// Cuts a CTA's share into tiles while walking over it, by whole warps: most neighbours have the
// same user. Users are asked for long before their tiles.
template <typename Traits>
class TileCursor {
 public:
  using Cta = Sm90Cta<Traits>;
  using TileAt = typename Cta::TileAt;

  __device__ __forceinline__ explicit TileCursor(const Cta& cta) : cta_(cta) {
    const Sm90Args& args = cta.params.args;
    const auto share = Cta::share_of_cta(args);
    left_ = share.columns;
    if (left_ == 0) return;
    tile_p_ = share.tile_p;
    position_ = args.divide_by_n(share.column);
    column_ = share.column - position_ * args.n;
    look_up(position_);
  }
  __device__ __forceinline__ bool take(TileAt& at) {
    // The first one has no columns and is passed over: so there is one place where tiles are cut.
#pragma unroll 1
    do {
      if (left_ == 0) return false;
      at.is_new_user = next_user_ != user_ || starts_tile_p();
      at.tile = {.user = next_user_,
                 .first_cand = position_,
                 .first_column = column_,
                 .num_columns = next_columns_};
      at.tile_p = tile_p_;
      user_ = next_user_;
      advance();
      at.ends_user = left_ == 0 || next_user_ != user_ || starts_tile_p();
    } while (at.tile.num_columns == 0);
    return true;
  }

 private:
  // Cuts the next tile.
  __device__ __forceinline__ void advance() {
    const Sm90Args& args = cta_.params.args;
    left_ -= next_columns_;
    column_ += next_columns_;
    const int passed = args.divide_by_n(column_);
    position_ += passed;
    column_ -= passed * args.n;
    const bool is_end = position_ == args.num_candidates;
    if (is_end) left_ -= args.padding;
    if (left_ == 0) return;
    if (is_end) {
      position_ = 0;
      ++tile_p_;
      look_up(0);
    }
#pragma unroll 1
    while (position_ - first_ >= 32) {
      users_[0] = users_[1];
      first_ += 32;
      users_[1] = user_at(first_ + 32);
    }
    find_next();
  }
  __device__ __forceinline__ bool starts_tile_p() const { return position_ == 0 && column_ == 0; }
  __device__ __forceinline__ int user_at(int first) const {
    const Sm90Args& args = cta_.params.args;
    const int position = first + static_cast<int>(threadIdx.x) % 32;
    const CandList& list = cta_.list;
    if (position >= list.end) return -1;
    if (list.users != nullptr) return list.users[position];
    return args.cand_to_user[list.cands[position]];
  }
  __device__ __forceinline__ void look_up(int first) {
    first_ = first;
    users_[0] = user_at(first);
    users_[1] = user_at(first + 32);
  }
  __device__ __forceinline__ void find_next() {
    const Sm90Args& args = cta_.params.args;
    const int before = position_ - first_;
    next_user_ = __shfl_sync(~0u, users_[0], before);
    next_columns_ = min(left_, kTileColumns);
    const int more_cands = args.divide_by_n(column_ + next_columns_ - 1);
    if (more_cands > 0) {
      std::uint64_t same = __ballot_sync(~0u, users_[0] == next_user_);
      if (before + more_cands >= 32) {
        same |= std::uint64_t{__ballot_sync(~0u, users_[1] == next_user_)} << 32;
      }
      // Past those at hand, the next tile begins.
      const auto cands =
          static_cast<unsigned>(__ffsll(static_cast<long long>(~(same >> before))) - 1);
      const int taken = static_cast<int>(min(cands, static_cast<unsigned>(more_cands) + 1));
      next_columns_ = min(next_columns_, taken * args.n - column_);
    }
  }

  const Cta& cta_;
  int left_;          // columns
  int tile_p_ = 0;    // from here on of the next tile
  int position_ = 0;  // of its first candidate in the list
  int column_ = 0;    // of that candidate
  int next_user_ = -1;
  int next_columns_ = 0;
  int user_ = -1;  // of the tile that was taken last
  int first_ = 0;  // position of the first of the users that are at hand, a lane each
  int users_[2];
};

// A ring of tiles in shared memory, from one warp of the producer to both consumers.
template <typename Traits>
class TileAnnouncer {
 public:
  using Cta = Sm90Cta<Traits>;
  using TileAt = typename Cta::TileAt;

  __device__ __forceinline__ TileAnnouncer(const Cta& cta, int lane) : cta_(cta), lane_(lane) {}

  __device__ __forceinline__ void announce(const TileAt& at) {
    device::mbarrier_wait(cta_.empty_tile(ring_.slot), ring_.phase ^ 1);
    if (lane_ == 0) {
      const int flags =
          at.tile.num_columns << 2 | (at.is_new_user ? 2 : 0) | (at.ends_user ? 1 : 0);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(cta_.announced(ring_.slot)),
                   "r"(at.tile.first_cand), "r"(at.tile.first_column), "r"(at.tile_p), "r"(flags)
                   : "memory");
      device::mbarrier_arrive(cta_.full_tile(ring_.slot));
    }
    __syncwarp();
    ring_.advance();
  }
  // There are no more: a tile without columns.
  __device__ __forceinline__ void end() { announce(TileAt{}); }

 private:
  const Cta& cta_;
  int lane_;
  device::FixedRingPosition<kTileSlots> ring_;
};

template <typename Traits>
class TileListener {
 public:
  using Cta = Sm90Cta<Traits>;
  using TileAt = typename Cta::TileAt;

  __device__ __forceinline__ explicit TileListener(const Cta& cta) : cta_(cta) {}

  // Its user stays unknown.
  __device__ __forceinline__ bool take(TileAt& at) {
    device::mbarrier_wait(cta_.full_tile(ring_.slot), ring_.phase);
    // Who frees the slot is who reads it: the others hear of it.
    uint4 tile{};
    if (threadIdx.x % 32 == 0) {
      tile = device::load_shared(cta_.announced(ring_.slot));
      device::mbarrier_arrive(cta_.empty_tile(ring_.slot));
    }
    tile = {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0),
            __shfl_sync(~0u, tile.w, 0)};
    ring_.advance();
    at.tile.first_cand = static_cast<int>(tile.x);
    at.tile.first_column = static_cast<int>(tile.y);
    at.tile.num_columns = static_cast<int>(tile.w >> 2);
    at.tile_p = static_cast<int>(tile.z);
    at.is_new_user = (tile.w & 2) != 0;
    at.ends_user = (tile.w & 1) != 0;
    return at.tile.num_columns > 0;
  }

 private:
  const Cta& cta_;
  device::FixedRingPosition<kTileSlots> ring_;
};

}  // namespace ikbo::bmm_impl
