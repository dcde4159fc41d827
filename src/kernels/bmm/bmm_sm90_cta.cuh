// SPDX-License-Identifier: Apache-2.0
// What every role of bmm_sm90 shares: where things lie in shared memory, barriers, the walk over
// tiles.
#pragma once

#include "kernels/bmm/bmm_sm90_traits.cuh"
#include "kernels/device/ptx_mbarrier.cuh"
#include "kernels/device/ring_position.cuh"

namespace ikbo::bmm_impl {

using device::RingPosition;

// Candidates user by user; in shared memory a CTA's own alone, by their numbers among all.
struct CandList {
  const std::int32_t* cands;  // nullptr: the batch is such a list
  const std::int32_t* users;  // of `cands`; nullptr: each is to be looked up
  int end;                    // nothing is to be read from here on
};

template <typename Traits>
struct Sm90Cta {
  const Sm90Params& params;
  std::uint32_t s_base;
  CandList list;

  // Shared memory: user matrices, stages, each consumer's staging, barriers, the CTA's list.
  __device__ __forceinline__ std::uint32_t user_matrix(int slot) const {
    return s_base + slot * params.args.slot_blocks * Traits::kUserBlockBytes;
  }
  __device__ __forceinline__ std::uint32_t stage(int slot) const {
    return user_matrix(params.args.user_slots) + slot * kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t staging(int consumer, int buffer) const {
    return stage(params.args.stages) + (consumer * kStagingBuffers + buffer) * kStagingBytes;
  }
  __device__ __forceinline__ std::uint32_t barrier(int index) const {
    return staging(kConsumers, 0) + index * static_cast<int>(sizeof(std::uint64_t));
  }
  __device__ __forceinline__ std::uint32_t full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ std::uint32_t empty(int slot) const {
    return barrier(kMaxStages + slot);
  }
  __device__ __forceinline__ std::uint32_t full_user(int slot) const {
    return barrier(2 * kMaxStages + slot);
  }
  __device__ __forceinline__ std::uint32_t empty_user(int slot) const {
    return barrier(2 * kMaxStages + kMaxUserSlots + slot);
  }
  __device__ __forceinline__ std::uint32_t turn(int consumer) const {
    return barrier(2 * kMaxStages + 2 * kMaxUserSlots + consumer);
  }
  __device__ __forceinline__ std::uint32_t own_list() const {
    return barrier(kBarrierBytes / static_cast<int>(sizeof(std::uint64_t)));
  }

  __device__ __forceinline__ bool is_async() const { return params.args.feed == BmmFeed::kAsync; }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = kThreads / 32;
    for (int s = 0; s < params.args.stages; ++s) {
      device::mbarrier_init(full(s), is_async() ? kThreads : 1);
      device::mbarrier_init(empty(s), kWarps);
    }
    for (int c = 0; c < kConsumers; ++c) device::mbarrier_init(turn(c), kWarps);
    for (int s = 0; s < params.args.user_slots; ++s) {
      device::mbarrier_init(full_user(s), 1);
      device::mbarrier_init(empty_user(s), kConsumers * kWarps);
    }
    device::mbarrier_init_fence();
  }

  // A CTA's share of the columns of all tiles of P: neighbours, those of the first tile of P first.
  struct Share {
    int columns;
    int tile_p;  // of the first one
    int column;
  };
  __device__ __forceinline__ static Share share_of_cta(const Sm90Args& args) {
    const int all = args.num_grains * args.num_tiles_p;
    const int cta = static_cast<int>(blockIdx.x);
    const int least = args.divide_by_ctas(all);
    const int more = all - least * static_cast<int>(gridDim.x);  // CTAs that have one more
    const int count = least + (cta < more ? 1 : 0);
    if (count == 0) return {};
    const int begin = least * cta + min(cta, more);
    const int tile_p = args.divide_by_grains(begin);
    return {count * args.grain, tile_p, (begin - tile_p * args.num_grains) * args.grain};
  }

  __device__ __forceinline__ int cand_at(int position) const {
    return list.cands == nullptr ? position : list.cands[position];
  }

  struct TileAt {
    Tile tile;
    int tile_p;
    int consumer;
    bool is_new_user;  // or a new tile of P
  };
  __device__ __forceinline__ static bool has_columns(const TileAt& at) {
    return at.tile.num_columns > 0;
  }
  // Cuts a CTA's share into tiles while walking over it, by whole warps: most neighbours have the
  // same user. Users are asked for long before their tiles.
  class TileCursor {
   public:
    __device__ __forceinline__ explicit TileCursor(const Sm90Cta& cta) : cta_(cta) {
      const Sm90Args& args = cta.params.args;
      const Share share = share_of_cta(args);
      left_ = share.columns;
      if (left_ == 0) return;
      tile_p_ = share.tile_p;
      position_ = args.divide_by_n(share.column);
      column_ = share.column - position_ * args.n;
      look_up(position_);
    }
    // The first one has no columns: so there is one place where tiles are cut.
    __device__ __forceinline__ bool take(TileAt& at) {
      if (left_ == 0) return false;
      const Sm90Args& args = cta_.params.args;
      at.is_new_user = next_columns_ > 0 && (next_user_ != user_ || starts_tile_p());
      at.tile = {.user = next_user_,
                 .first_cand = position_,
                 .first_column = column_,
                 .num_columns = next_columns_};
      at.tile_p = tile_p_;
      at.consumer = consumer_;
      user_ = next_user_;
      if (next_columns_ > 0) consumer_ ^= 1;
      left_ -= next_columns_;
      column_ += next_columns_;
      const int passed = args.divide_by_n(column_);
      position_ += passed;
      column_ -= passed * args.n;
      const bool is_end = position_ == args.num_candidates;
      if (is_end) left_ -= args.padding;
      if (left_ == 0) return true;
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
      return true;
    }
    // Whether the tile that was taken last is the last one with its matrix.
    __device__ __forceinline__ bool ends_user() const {
      return left_ == 0 || starts_tile_p() || next_user_ != user_;
    }

   private:
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

    const Sm90Cta& cta_;
    int left_;          // columns
    int tile_p_ = 0;    // from here on of the next tile
    int position_ = 0;  // of its first candidate in the list
    int column_ = 0;    // of that candidate
    int next_user_ = -1;
    int next_columns_ = 0;
    int user_ = -1;  // of the tile that was taken last
    int consumer_ = 0;
    int first_ = 0;  // position of the first of the users that are at hand, a lane each
    int users_[2];
  };

  struct Column {
    int cand;
    int n;
  };
  // Where a column of the tile, below its num_columns, lies.
  __device__ __forceinline__ Column column_at(const Tile& tile, int column) const {
    const int of_first = tile.first_column + column;
    const int position = params.args.divide_by_n(of_first);
    return {cand_at(tile.first_cand + position), of_first - position * params.args.n};
  }
};

}  // namespace ikbo::bmm_impl
