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
  using Softmax = OnlineSoftmax<Element, Traits::kKeyBlock>;
  using Cta::address;
  using Cta::kConsumers;
  using Cta::kHeadDim;
  using Cta::kKeyBlock;
  using Cta::params;
  using Cta::release;
  using Cta::s_base;
  using Cta::shared;
  using Cta::vector_offset;
  using Cta::wait_for;

  // s = q k^T of one block.
  __device__ __forceinline__ void multiply_keys(typename Softmax::Logits& s, std::uint32_t s_query,
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
                                                  const typename Softmax::Weights& p, int stage,
                                                  int accumulate) const {
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

  // The consumers issue in turns: `take` waits for the `pass` of the one before.
  static constexpr int kFirstTurnBarrier = 1 + kConsumers;
  __device__ __forceinline__ static void take_turn(int consumer) {
    device::named_barrier_sync(kFirstTurnBarrier + consumer, 2 * kThreads);
  }
  __device__ __forceinline__ static void pass_turn(int consumer) {
    const int next = consumer + 1 == kConsumers ? 0 : consumer + 1;
    device::named_barrier_arrive(kFirstTurnBarrier + next, 2 * kThreads);
  }

  // The tile that came with a Q, alike in all threads.
  __device__ __forceinline__ ConsumerTile tile_at(int consumer, int slot) const {
    const ConsumerTile tile = shared.tiles[consumer][slot];
    return {.num_keys = __shfl_sync(~0u, tile.num_keys, 0),
            .num_rows = __shfl_sync(~0u, tile.num_rows, 0),
            .partial = tile.partial,
            .keys_of_all = Traits::kHasOwnRows ? __shfl_sync(~0u, tile.keys_of_all, 0) : 0};
  }
  // Number of this thread's row among the consumer's 64.
  __device__ __forceinline__ static int row_of(int thread, int half) {
    return thread / 32 * 16 + thread % 32 / 4 + 8 * half;
  }

  // What a consumer carries along. The values of a tile's last block are multiplied together with
  // the logits of the next tile's first: between two tiles the tensor cores see no gap.
  struct Consumer {
    int number;
    int thread;  // of the warpgroup
    Ring k;
    Ring v;
    QueryRing q;  // of the tile that is not stored yet
    Softmax softmax;
    ConsumerTile tile{.num_rows = 1};  // and where its Q lies: of the block that comes next
    int q_slot = 0;
    int left = 0;             // keys of the tile that are not yet multiplied
    bool is_pending = false;  // p holds weights that are not yet multiplied with their values
    int accumulate = 0;       // whether those are not the first of their tile
    bool has_next = false;  // the next block of K and the values pending have been seen to be there
    float o[kHeadDim / 2];
    typename Softmax::Weights p;
  };

  // Waits for the Q of the next tile.
  __device__ __forceinline__ void take_tile(Consumer& me) const {
    QueryRing q = me.q;
    if (me.is_pending) q.advance();
    wait_for(shared.full_q[me.number], q);
    me.tile = tile_at(me.number, q.slot);
    me.q_slot = q.slot;
    me.left = me.tile.num_rows > 0 ? me.tile.num_keys : 0;
  }

  // NOTE: in the order in which the instructions are first needed: they come from far. The loop
  // over whole blocks, with the step to the next tile, lies together: a jump out of it costs
  // hundreds of cycles.
  __device__ __forceinline__ void consume(int number, int thread) const {
    Consumer me{.number = number, .thread = thread};
    if (number == kConsumers - 1) pass_turn(number);  // the first turn is consumer 0's
    while (true) {                                    // nothing is pending
      if (is_done(me)) take_tile(me);
      if (me.tile.num_keys == 0) break;
      if (me.tile.num_rows == 0) {
        skip_tile(me);
        continue;
      }
      start_tile(me);
      while (me.left > 0) {
#pragma unroll 1
        do {
          compute_block(me);
        } while (me.left > 0);
        if (makes_room(me.tile)) take_tile(me);
      }
      finish(me);
    }
  }

  // Of the tile at hand, this consumer's part; before the first it is.
  __device__ __forceinline__ static bool is_done(const Consumer& me) {
    return me.left <= 0 && me.tile.num_rows > 0;
  }

  // Whether the next Q may come before this tile is finished. Not so with short tiles: it would
  // need the place of this one's.
  __device__ __forceinline__ static bool makes_room(const ConsumerTile& tile) {
    return Traits::kQueryBuffers > 1 && tile.num_keys > kKeyBlock;
  }

  // Goes through the motions for a tile in which this consumer has no rows.
  __device__ __forceinline__ void skip_tile(Consumer& me) const {
    const int blocks = (me.tile.num_keys + kKeyBlock - 1) / kKeyBlock;
    for (int j = 0; j < blocks; ++j) {
      take_turn(me.number);
      pass_turn(me.number);
      wait_for(shared.full_k, me.k);
      release(shared.empty_k, me.k, me.thread);
      wait_for(shared.full_v, me.v);
      release(shared.empty_v, me.v, me.thread);
    }
    device::mbarrier_arrive(address(shared.staged[me.number][me.q.slot]));
    __syncwarp();
    me.q.advance();
    me.tile.num_rows = 1;
  }

  // The first block of a tile, with nothing pending.
  __device__ __forceinline__ void start_tile(Consumer& me) const {
    typename Softmax::Logits s;
    wait_for(shared.full_k, me.k);
    take_turn(me.number);
    multiply_keys(s, address(shared.q[me.number][me.q_slot]), me.k.slot);
    pass_turn(me.number);
    device::wgmma_wait<0>();
    device::fence_registers(s);
    release(shared.empty_k, me.k, me.thread);
    mask(s, me);
    me.softmax.begin(s, params.args.scale_log2);
    me.softmax.step(s, me.p);
    me.is_pending = true;
    me.accumulate = 0;
    me.left -= kKeyBlock;
  }

  // Multiplies with the logits of the next block the values of the block before, of this tile or
  // of the one before it, and leaves its own values pending.
  __device__ __forceinline__ void compute_block(Consumer& me) const {
    typename Softmax::Logits s;
    if (!me.has_next) {
      wait_for(shared.full_k, me.k);
      wait_for(shared.full_v, me.v);
    }
    take_turn(me.number);
    multiply_keys(s, address(shared.q[me.number][me.q_slot]), me.k.slot);
    multiply_values(me.o, me.p, me.v.slot, me.accumulate);
    pass_turn(me.number);
    device::wgmma_wait<1>();
    device::fence_registers(s);
    release(shared.empty_k, me.k, me.thread);
    mask(s, me);
    float finished[2];
    const bool begins = me.left == me.tile.num_keys;
    if (begins) {
      finish_rows(me, finished);
      me.softmax.begin(s, params.args.scale_log2);
    }
    typename Softmax::Weights next_p;
    const bool rescales = me.softmax.step(s, next_p);
    Ring next_v = me.v;
    next_v.advance();
    me.has_next = this->has(shared.full_k, me.k) && this->has(shared.full_v, next_v);
    finish_before_wait(me.softmax.sum, s_base);
    device::wgmma_wait<0>();
    device::fence_registers(me.o);
    release(shared.empty_v, me.v, me.thread);
    // NOTE: a plain copy would be made by giving both the same registers, which the values are
    // still multiplied from.
    const std::uint32_t zero = static_cast<std::uint32_t>(computed_here(0));
#pragma unroll
    for (int i = 0; i < kKeyBlock / 4; ++i) me.p[i / 4][i % 4] = next_p[i / 4][i % 4] ^ zero;
    me.left -= kKeyBlock;
    me.accumulate = begins ? 0 : 1;
    if (begins) {
      stage_tile(finished, me);
    } else if (rescales) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) me.o[i] *= me.softmax.factor[i % 4 / 2];
    }
  }

  // Logits of the next block's keys that do not count.
  __device__ __forceinline__ void mask(typename Softmax::Logits& s, const Consumer& me) const {
    bool has_limits = params.args.histories.cand_lengths != nullptr;
    if constexpr (Traits::kHasOwnRows) {
      const int limited = me.tile.num_keys - me.tile.keys_of_all;
      if (me.left - limited >= kKeyBlock) return;
      has_limits = limited > 0;
    } else {
      if (!has_limits && me.left >= kKeyBlock) return;
    }
    const int thread = computed_here(me.thread);
    int limit[2] = {me.left, me.left};
    if (has_limits) {
      for (int half = 0; half < 2; ++half) {
        limit[half] -= me.tile.num_keys - shared.limits[me.number][me.q_slot][row_of(thread, half)];
      }
    }
    Softmax::mask(s, limit, thread);
  }

  // Multiplies what is pending, and stores.
  __device__ __forceinline__ void finish(Consumer& me) const {
    wait_for(shared.full_v, me.v);
    multiply_values(me.o, me.p, me.v.slot, me.accumulate);
    device::wgmma_wait<0>();
    device::fence_registers(me.o);
    release(shared.empty_v, me.v, me.thread);
    me.has_next = false;
    device::named_barrier_sync(1 + me.number, kThreads);  // all of Q has been read
    float finished[2];
    finish_rows(me, finished);
    stage_tile(finished, me);
    me.is_pending = false;
  }

  // Stores the log-sum-exp of this thread's rows, and tells what their sums are to be multiplied
  // by.
  __device__ __forceinline__ void finish_rows(const Consumer& me, float (&inverse)[2]) const {
    const int thread = computed_here(me.thread);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(me.softmax.sum[half]);
      inverse[half] = sum == 0 ? 0.0f : reciprocal_approx(sum);
      if (thread % 4 != 0) continue;
      shared.lse[me.number][me.q.slot][row_of(thread, half)] =
          sum == 0 ? Softmax::kMinusInfinity
                   : (me.softmax.shift[half] + log2_approx(sum)) * 0.693147180559945f;
    }
  }

  // Multiplies the rows and hands the tile over: rounded, in the place of its Q, or as a partial
  // result in global memory.
  // NOTE: nothing reads this Q any more: a later multiplication of the warpgroup has ended.
  __device__ __forceinline__ void stage_tile(const float (&inverse)[2], Consumer& me) const {
    if (params.args.partial_out != nullptr) {
      store_partial(inverse, me);
    } else {
      store_in_place_of_query(inverse, me);
    }
    device::mbarrier_arrive(address(shared.staged[me.number][me.q.slot]));
    __syncwarp();
    me.q.advance();
  }

  __device__ __forceinline__ void store_partial(const float (&inverse)[2],
                                                const Consumer& me) const {
    const int thread = computed_here(me.thread);
    const int first_row = shared.tiles[me.number][me.q.slot].partial;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = first_row + row_of(thread, half);
      auto* g_row =
          reinterpret_cast<float2*>(params.args.partial_out + row * kHeadDim) + thread % 4;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float* d = me.o + 4 * j + 2 * half;
        g_row[4 * j] = make_float2(d[0] * inverse[half], d[1] * inverse[half]);
      }
    }
  }

  __device__ __forceinline__ void store_in_place_of_query(const float (&inverse)[2],
                                                          const Consumer& me) const {
    const std::uint32_t s_tile = address(shared.q[me.number][me.q.slot]);
    const int thread = computed_here(me.thread);
    const int lane = thread % 32;
    const int first_row = thread / 32 * 16;
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
  }
};

}  // namespace ikbo::target_attention_impl
