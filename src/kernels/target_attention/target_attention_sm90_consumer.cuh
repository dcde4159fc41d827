// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of target_attention_sm90.
#pragma once

#include "kernels/device/ptx_mma.cuh"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/device/ptx_wgmma_registers.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"
#include "kernels/target_attention/target_attention_sm90_softmax.cuh"

namespace ikbo::target_attention_impl {

// Keeps the assembler from moving the sums, and what they are made of, past the wait that follows:
// a store in the way, which never takes place since sums are not negative.
__device__ __forceinline__ void finish_before_wait(const float (&sum)[2],
                                                   std::uint32_t s_anything) {
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.lt.f32 p, %0, 0f00000000;\n"
      "setp.lt.or.f32 q, %1, 0f00000000, p;\n"
      "@q st.shared.f32 [%2], %0;\n}" ::"f"(sum[0]),
      "f"(sum[1]), "r"(s_anything)
      : "memory");
}

template <typename Traits>
struct Sm90Consumers : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Element = typename Traits::Element;
  using Ring = typename Cta::Ring;
  using QueryRing = typename Cta::QueryRing;
  using Row = typename Cta::Row;
  using TileAt = typename Cta::TileAt;
  using TileCursor = typename Cta::TileCursor;
  using Softmax = OnlineSoftmax<Element, Traits::kKeyBlock>;
  using Cta::address;
  using Cta::blocks_of;
  using Cta::kHeadDim;
  using Cta::kKeyBlock;
  using Cta::params;
  using Cta::release;
  using Cta::row_at;
  using Cta::rows_of;
  using Cta::s_base;
  using Cta::shared;
  using Cta::vector_offset;
  using Cta::wait_for;

  // s = q k^T of one block.
  __device__ __forceinline__ void multiply_keys(float (&s)[kKeyBlock / 2], std::uint32_t s_query,
                                                int stage) const {
    const std::uint64_t q = device::wgmma_descriptor_k_major_128b(s_query);
    const std::uint64_t k = device::wgmma_descriptor_k_major_128b(address(shared.k[stage]));
    device::fence_registers(s);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int within = step % 4 * device::kWgmmaStepKMajor;
      device::wgmma_m64k16<Element, kKeyBlock, false>(
          s, q + step / 4 * (Traits::kQueryChunkBytes / 16) + within,
          k + step / 4 * (Traits::kBlockChunkBytes / 16) + within, step > 0);
    }
    device::wgmma_commit();
    device::fence_registers(s);
  }

  // o += p v of one block.
  __device__ __forceinline__ void multiply_values(float (&o)[kHeadDim / 2],
                                                  const std::uint32_t (&p)[kKeyBlock / 16][4],
                                                  int stage, int accumulate) const {
    const std::uint64_t v =
        device::wgmma_descriptor_mn_major_wide(address(shared.v[stage]), Traits::kBlockChunkBytes);
    device::fence_registers(o);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeyBlock / 16; ++step) {
      device::wgmma_m64k16_registers<Element, kHeadDim>(
          o, p[step], v + step * device::kWgmmaStepMnMajor, step > 0 ? 1 : accumulate);
    }
    device::wgmma_commit();
    device::fence_registers(o);
  }

  // The consumers issue in turns: `take` waits for the other's `pass`.
  static constexpr int kFirstTurnBarrier = 1 + kConsumers;
  __device__ __forceinline__ static void take_turn(int consumer) {
    device::named_barrier_sync(kFirstTurnBarrier + consumer, kConsumers * kThreads);
  }
  __device__ __forceinline__ static void pass_turn(int consumer) {
    device::named_barrier_arrive(kFirstTurnBarrier + 1 - consumer, kConsumers * kThreads);
  }

  // Keys that count for this thread's two rows.
  __device__ __forceinline__ void row_limits(const TileAt& at, int consumer, int thread,
                                             int (&limit)[2]) const {
    for (int half = 0; half < 2; ++half) {
      limit[half] = at.tile.num_keys;
      if (params.args.cand_lengths == nullptr) continue;
      const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
      if (row >= rows_of(at.tile, consumer)) continue;
      const Row r = row_at(at, at.tile.first_row + consumer * kRowsOfConsumer + row);
      limit[half] = min(limit[half], params.args.cand_lengths[r.cand]);
    }
  }

  // What a consumer carries along. The values of a tile's last block are multiplied together with
  // the logits of the next tile's first: between two tiles the tensor cores see no gap.
  struct Consumer {
    int number;
    int thread;  // of the warpgroup
    Ring k;
    Ring v;
    QueryRing q;
    Softmax softmax;
    bool is_pending = false;  // p holds weights that are not yet multiplied with their values
    bool is_first = true;     // those would be the first of their tile
    float o[kHeadDim / 2];
    typename Softmax::Weights p;
  };

  __device__ __forceinline__ void consume(int number, int thread) const {
    Consumer me{.number = number, .thread = thread};
    if (number == 1) pass_turn(number);  // the first turn is consumer 0's
    TileCursor cursor(params.args);
    for (TileAt at; cursor.take(at);) {
      const int blocks = blocks_of(at.tile);
      if (blocks == 0) continue;
      if (rows_of(at.tile, number) == 0) {
        finish(me);
        skip_tile(blocks, me);
      } else {
        compute_tile(at, blocks, me);
        if constexpr (Traits::kQueryBuffers == 1) finish(me);
      }
    }
    finish(me);
  }

  // Goes through the motions for a tile in which this consumer has no rows.
  __device__ __forceinline__ void skip_tile(int blocks, Consumer& me) const {
    for (int j = 0; j < blocks; ++j) {
      take_turn(me.number);
      pass_turn(me.number);
      wait_for(shared.full_k, me.k);
      release(shared.empty_k, me.k, me.thread);
      wait_for(shared.full_v, me.v);
      release(shared.empty_v, me.v, me.thread);
    }
  }

  // Multiplies with the logits of each block the values of the block before, of this tile or of
  // the one before it. The last block's values are left pending.
  __device__ __forceinline__ void compute_tile(const TileAt& at, int blocks, Consumer& me) const {
    typename Softmax::Logits s;
    int limit[2];
    row_limits(at, me.number, me.thread, limit);
    const bool has_limits = params.args.cand_lengths != nullptr;
    const auto mask = [&](int block) {
      if (has_limits || (block + 1) * kKeyBlock > at.tile.num_keys) {
        Softmax::mask(s, block * kKeyBlock, limit, me.thread);
      }
    };
    QueryRing next_q = me.q;
    if (me.is_pending) next_q.advance();
    const std::uint32_t s_query = address(shared.q[me.number][next_q.slot]);
    wait_for(shared.full_q[me.number], next_q);
    int begin = 0;
    if (!me.is_pending) {
      wait_for(shared.full_k, me.k);
      take_turn(me.number);
      multiply_keys(s, s_query, me.k.slot);
      pass_turn(me.number);
      device::wgmma_wait<0>();
      device::fence_registers(s);
      release(shared.empty_k, me.k, me.thread);
      mask(0);
      me.softmax = {.scale_log2 = params.args.scale_log2};
      me.softmax.begin(s, me.p);
      me.is_pending = true;
      me.is_first = true;
      begin = 1;
    }
#pragma unroll 1
    for (int j = begin; j < blocks; ++j) {
      wait_for(shared.full_k, me.k);
      wait_for(shared.full_v, me.v);
      take_turn(me.number);
      multiply_keys(s, s_query, me.k.slot);
      multiply_values(me.o, me.p, me.v.slot, !me.is_first);
      pass_turn(me.number);
      device::wgmma_wait<1>();
      device::fence_registers(s);
      release(shared.empty_k, me.k, me.thread);
      mask(j);
      const Softmax finished = me.softmax;
      typename Softmax::Weights next_p;
      bool rescales = false;
      if (j == 0) {
        me.softmax = {.scale_log2 = params.args.scale_log2};
        me.softmax.begin(s, next_p);
      } else {
        rescales = me.softmax.step(s, next_p);
      }
      finish_before_wait(me.softmax.sum, s_base);
      device::wgmma_wait<0>();
      device::fence_registers(me.o);
      release(shared.empty_v, me.v, me.thread);
      // NOTE: a plain copy would be made by giving both the same registers, which the values are
      // still multiplied from.
      const std::uint32_t zero = static_cast<std::uint32_t>(computed_here(0));
#pragma unroll
      for (int i = 0; i < kKeyBlock / 4; ++i) me.p[i / 4][i % 4] = next_p[i / 4][i % 4] ^ zero;
      me.is_first = j == 0;
      if (j == 0) {
        stage_tile(finished, me);
      } else if (rescales) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) me.o[i] *= me.softmax.factor[i % 4 / 2];
      }
    }
  }

  // Multiplies what is pending, and stores.
  __device__ __forceinline__ void finish(Consumer& me) const {
    if (!me.is_pending) return;
    wait_for(shared.full_v, me.v);
    multiply_values(me.o, me.p, me.v.slot, !me.is_first);
    device::wgmma_wait<0>();
    device::fence_registers(me.o);
    release(shared.empty_v, me.v, me.thread);
    device::named_barrier_sync(1 + me.number, kThreads);  // all of Q has been read
    stage_tile(me.softmax, me);
    me.is_pending = false;
  }

  // Divides by the sums, rounds, and puts the tile in the place of its Q.
  // NOTE: the warps have met since the last of them read Q: at a turn, or in finish().
  __device__ __forceinline__ void stage_tile(const Softmax& softmax, Consumer& me) const {
    const std::uint32_t s_tile = address(shared.q[me.number][me.q.slot]);
    const int lane = computed_here(me.thread % 32);
    const int first_row = me.thread / 32 * 16;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(softmax.sum[half]);
      inverse[half] = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
      const float lse = sum == 0 ? Softmax::kMinusInfinity
                                 : (softmax.shift[half] + __log2f(sum)) * 0.693147180559945f;
      if (lane % 4 == 0) {
        shared.lse[me.number][me.q.slot][first_row + lane / 4 + 8 * half] = lse;
      }
    }
    // Matrices of 8 x 8: (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
    const auto row = static_cast<unsigned>(first_row + lane % 16);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      const float* d = me.o + 4 * j;
      device::store_matrices(s_tile + vector_offset(row, static_cast<unsigned>(j + lane / 16)),
                             round_pair<Element>(d[0] * inverse[0], d[1] * inverse[0]),
                             round_pair<Element>(d[2] * inverse[1], d[3] * inverse[1]),
                             round_pair<Element>(d[4] * inverse[0], d[5] * inverse[0]),
                             round_pair<Element>(d[6] * inverse[1], d[7] * inverse[1]));
    }
    device::fence_smem_to_async();
    device::mbarrier_arrive(address(shared.staged[me.number][me.q.slot]));
    __syncwarp();
    me.q.advance();
  }
};

}  // namespace ikbo::target_attention_impl
