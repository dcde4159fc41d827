// SPDX-License-Identifier: Apache-2.0
// The loader of K and V, and the warp that clears rows of V that do not count.
#pragma once

#include "kernels/device/ptx_tma.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90History : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Ring = typename Cta::Ring;
  using TileAt = typename Cta::TileAt;
  using TileCursor = typename Cta::TileCursor;
  using Cta::address;
  using Cta::blocks_of;
  using Cta::kKeyBlock;
  using Cta::params;
  using Cta::shared;

  // Whether V's last block holds rows that do not count and are not zeros.
  __device__ __forceinline__ bool has_stray_rows(const Tile& tile) const {
    return tile.first_key + tile.num_keys < params.args.histories.num_keys &&
           tile.num_keys % kKeyBlock != 0;
  }

  __device__ __forceinline__ void load_block(unsigned char* s_block, const CUtensorMap* map,
                                             std::uint32_t barrier, const TileAt& at,
                                             int block) const {
    device::mbarrier_arrive_expect_bytes(barrier, Traits::kBlockBytes);
#pragma unroll
    for (int c = 0; c < Traits::kChunks; ++c) {
      device::tma_load_4d(address(*s_block) + c * Traits::kBlockChunkBytes, map, barrier,
                          c * Traits::kChunkColumns, at.tile.first_key + block * kKeyBlock,
                          at.kv_head, at.tile.history);
    }
  }

  // A block of V is asked for after the next one of K, as the consumers want them.
  __device__ __forceinline__ void load_keys_and_values() const {
    Ring ring_k;
    Ring ring_v;
    TileAt v_at{};
    int v_block = 0;
    bool has_v = false;
    const auto load_v = [&] {
      device::mbarrier_wait(address(shared.empty_v[ring_v.slot]), ring_v.phase ^ 1);
      const bool clears = v_block == blocks_of(v_at.tile) - 1 && has_stray_rows(v_at.tile);
      load_block(shared.v[ring_v.slot], &params.v,
                 address(clears ? shared.loaded_v[ring_v.slot] : shared.full_v[ring_v.slot]), v_at,
                 v_block);
      ring_v.advance();
    };
    TileCursor cursor(*this);
    for (TileAt at; cursor.take(at);) {
      const int blocks = blocks_of(at.tile);
      for (int j = 0; j < blocks; ++j) {
        device::mbarrier_wait(address(shared.empty_k[ring_k.slot]), ring_k.phase ^ 1);
        load_block(shared.k[ring_k.slot], &params.k, address(shared.full_k[ring_k.slot]), at, j);
        ring_k.advance();
        if (has_v) load_v();
        v_at = at;
        v_block = j;
        has_v = true;
      }
    }
    if (has_v) load_v();
  }

  // Zeros V's rows from the tile's last key on, in the last block of each tile that has such rows.
  __device__ __forceinline__ void clear_stray_rows(int lane) const {
    int blocks_before = 0;
    int phase_bits = 0;  // of loaded_v, a bit per stage
    TileCursor cursor(*this);
    for (TileAt at; cursor.take(at);) {
      const Tile& tile = at.tile;
      const int blocks = blocks_of(tile);
      blocks_before += blocks;
      if (blocks == 0 || !has_stray_rows(tile)) continue;
      const int slot = (blocks_before - 1) % Traits::kStages;
      device::mbarrier_wait(address(shared.loaded_v[slot]), phase_bits >> slot & 1);
      phase_bits ^= 1 << slot;
      const int first = tile.num_keys % kKeyBlock * Traits::kRowBytes / 16;
      constexpr int kEnd = Traits::kBlockChunkBytes / 16;
#pragma unroll
      for (int c = 0; c < Traits::kChunks; ++c) {
        auto* s_vectors = reinterpret_cast<uint4*>(shared.v[slot] + c * Traits::kBlockChunkBytes);
        for (int i = first + lane; i < kEnd; i += 32) s_vectors[i] = make_uint4(0, 0, 0, 0);
      }
      device::fence_smem_to_async();
      __syncwarp();
      if (lane == 0) device::mbarrier_arrive(address(shared.full_v[slot]));
    }
  }
};

}  // namespace ikbo::target_attention_impl
