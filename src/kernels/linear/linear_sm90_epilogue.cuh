// SPDX-License-Identifier: Apache-2.0
// Epilogues of linear_sm90, from registers to global memory.
//
// A unit is 8 neighbouring outputs of one row: thread t of a quad holds columns 32 * j + 8 * t of
// the tile, for rows i and i + 8 of its warp's 16, j < kTileM / 32.
//   user stage       partial[u][m] = sum + bias, fp32
//   candidate stage  out[b][m] = round(act(sum + partial[i(b)][m]))
// The partial is added last, whatever the tile: a row has the same bits wherever it lies in the
// batch. Its first kAhead units are asked for while the last matrix instructions run, each of the
// others as soon as one of those is added.
#pragma once

#include "kernels/device/activation.cuh"
#include "kernels/device/round_pair.cuh"
#include "kernels/linear/linear_sm90.cuh"

namespace ikbo::linear_impl {

// Eight rounded values; word i holds values 2i and 2i + 1.
struct Packed {
  std::uint32_t word[4];
};

// Accumulator of value e of the unit (j, half): half 0 is row i, half 1 is row i + 8.
template <int kTileM>
__device__ constexpr int unit_index(int j, int half, int e) {
  return 4 * (e % 4 * (kTileM / 32) + j) + 2 * half + e / 4;
}

template <typename Traits>
struct Epilogue {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kBlocksM = kTileM / 32;
  static constexpr int kUnits = 2 * kBlocksM;
  // Units of the partial on their way at a time: what the accumulators leave of 232 registers, less
  // 56 for all else; all of a small tile.
  static constexpr int kFitAhead = (232 - 56 - kTileM / 2) / 8;
  static constexpr int kAhead = kFitAhead < kUnits ? kFitAhead : kUnits;
  using Acc = float[kTileM / 2];
  using Ahead = float[kAhead][8];

  const Sm90Args& args;

  __device__ __forceinline__ int user_of(int row) const {
    return args.cand_to_user[min(row, args.x.rows - 1)];
  }

  __device__ __forceinline__ float* partial_of(int row, int m) const {
    return args.user_partial + static_cast<std::int64_t>(row) * args.partial_columns + m;
  }

  __device__ __forceinline__ static void load_unit(float (&v)[8], const float* g_partial) {
    const auto* g = reinterpret_cast<const float4*>(g_partial);
    const float4 low = g[0];
    const float4 high = g[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  }

  __device__ __forceinline__ static void take_unit(float (&v)[8], const Acc& acc, int j, int half) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = acc[unit_index<kTileM>(j, half, e)];
  }

  __device__ __forceinline__ static Packed pack(const float (&v)[8]) {
    return {{device::round_pair<Element>(v[0], v[1]), device::round_pair<Element>(v[2], v[3]),
             device::round_pair<Element>(v[4], v[5]), device::round_pair<Element>(v[6], v[7])}};
  }

  // User stage: one unit of the partial.
  __device__ __forceinline__ void store_partial(float (&v)[8], int row, int m) const {
    if (row >= args.x.rows) return;
    if (const auto* g_bias = static_cast<const Element*>(args.bias); g_bias != nullptr) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (m + e < args.m) v[e] += static_cast<float>(g_bias[m + e]);
      }
    }
    auto* g = reinterpret_cast<float4*>(partial_of(row, m));
    g[0] = make_float4(v[0], v[1], v[2], v[3]);
    g[1] = make_float4(v[4], v[5], v[6], v[7]);
  }

  __device__ __forceinline__ void store_all_partials(const Acc& acc, const int (&row)[2],
                                                     int m) const {
#pragma unroll
    for (int j = 0; j < kBlocksM; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[8];
        take_unit(v, acc, j, half);
        store_partial(v, row[half], m + 32 * j);
      }
    }
  }

  // Candidate stage. `g_partial`: the two rows' users, at this thread's first column.
  __device__ __forceinline__ static void fetch_partials(Ahead& ahead,
                                                        const float* const (&g_partial)[2]) {
#pragma unroll
    for (int unit = 0; unit < kAhead; ++unit) {
      load_unit(ahead[unit], g_partial[unit % 2] + 32 * (unit / 2));
    }
  }

  // After fetch_partials.
  __device__ __forceinline__ static void add_partials(Acc& acc, Ahead& ahead,
                                                      const float* const (&g_partial)[2]) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        acc[unit_index<kTileM>(unit / 2, unit % 2, e)] += ahead[unit % kAhead][e];
      }
      const int next = unit + kAhead;
      if (next < kUnits) load_unit(ahead[unit % kAhead], g_partial[next % 2] + 32 * (next / 2));
    }
  }

  __device__ __forceinline__ Element* out_of(int row, int m) const {
    return static_cast<Element*>(args.out) + static_cast<std::int64_t>(row) * args.m + m;
  }

  // Whether every unit of the output is 16 bytes of their own.
  __device__ __forceinline__ bool has_aligned_out() const {
    return args.m % 8 == 0 && reinterpret_cast<std::uintptr_t>(args.out) % 16 == 0;
  }

  // Values [begin, end) of 8, one at a time.
  __device__ __forceinline__ static void store_some(Element* g_out, const Packed& p, int begin,
                                                    int end) {
    auto* g = reinterpret_cast<std::uint16_t*>(g_out);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e >= begin && e < end) g[e] = static_cast<std::uint16_t>(p.word[e / 2] >> (e % 2 * 16));
    }
  }

  __device__ __forceinline__ static void store_all(Element* g_out, const Packed& p) {
    *reinterpret_cast<uint4*>(g_out) = {p.word[0], p.word[1], p.word[2], p.word[3]};
  }

  // The 8 values that end `shift` (0..7) before the end of `current`; `before` precedes it.
  __device__ __forceinline__ static Packed shifted(const Packed& before, const Packed& current,
                                                   int shift) {
    if (shift == 0) return current;
    const int start = 8 - shift;  // 1..7
    std::uint32_t four[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const auto word = [&](int w) { return w < 4 ? before.word[w] : current.word[w - 4]; };
      four[i] = start & 4 ? word(i + 2) : word(i);
    }
    std::uint32_t two[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) two[i] = start & 2 ? four[i + 1] : four[i];
    Packed result;
    const unsigned selector = start & 1 ? 0x5432 : 0x3210;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.word[i] = __byte_perm(two[i], two[i + 1], selector);
    return result;
  }

  // A thread's two rows of the output, which lie 8 * M elements apart.
  struct OutRows {
    Element* g;      // the first, at the thread's first column of the tile
    int shift;       // elements that each row's start lies after a multiple of 16 bytes
    bool exists[2];  // in the tensor
  };

  __device__ __forceinline__ OutRows make_out_rows(int row, int m) const {
    const auto address = reinterpret_cast<std::uintptr_t>(out_of(row, 0));
    return {out_of(row, m),
            static_cast<int>(address / 2 % 8),
            {row < args.x.rows, row + 8 < args.x.rows}};
  }

  // Rows that do not start at 16 bytes: each quad's 32 columns move right by what the row lacks, so
  // that all stores but those at a tile's edges are aligned ones. `m` is the column of `current`,
  // `offset` elements after the row's first; `previous` holds the unit 32 columns before. All lanes
  // of the warp come here.
  __device__ __forceinline__ void store_shifted(const Packed& current, const Packed& previous,
                                                const OutRows& out, int half, int offset, int m,
                                                int first_m) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool is_last = lane % 4 == 3;
    Packed before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      before.word[i] = __shfl_sync(~0u, is_last ? previous.word[i] : current.word[i],
                                   (lane & ~3) | ((lane + 3) & 3));
    }
    const int m_start = m - out.shift;
    const int m_end = min(args.m, first_m + kTileM);
    if (!out.exists[half] || m_start >= m_end) return;
    const Packed p = shifted(before, current, out.shift);
    Element* g_out = out.g + half * std::int64_t{8} * args.m + (offset - out.shift);
    if (m_start >= first_m && m_start + 8 <= m_end) {
      store_all(g_out, p);
    } else {
      store_some(g_out, p, first_m - m_start, m_end - m_start);
    }
  }

  // Rounds and stores a tile whose activation is applied. `m` is this thread's first column.
  template <bool kAligned>
  __device__ __forceinline__ void store_tile(const Acc& acc, const OutRows& out, int first_m,
                                             int m) const {
    Packed previous[2] = {};
#pragma unroll
    for (int j = 0; j < kBlocksM; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[8];
        take_unit(v, acc, j, half);
        const Packed p = pack(v);
        if constexpr (kAligned) {
          if (out.exists[half] && m + 32 * j < args.m) {
            store_all(out.g + half * std::int64_t{8} * args.m + 32 * j, p);
          }
        } else {
          store_shifted(p, previous[half], out, half, 32 * j, m + 32 * j, first_m);
          previous[half] = p;
        }
      }
    }
    if constexpr (!kAligned) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_shifted(previous[half], previous[half], out, half, kTileM, m + kTileM, first_m);
      }
    }
  }

  // One finished unit of a tile that several CTAs summed up.
  __device__ __forceinline__ void finish_unit(float (&v)[8], int row, int m) const {
    if (row >= args.x.rows) return;
    if (args.cand_to_user == nullptr) {
      store_partial(v, row, m);
      return;
    }
    float partial[8];
    load_unit(partial, partial_of(user_of(row), m));
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] += partial[e];
    device::activate_fast(args.activation, v);
    if (has_aligned_out()) {
      if (m < args.m) store_all(out_of(row, m), pack(v));
    } else {
      store_some(out_of(row, m), pack(v), 0, args.m - m);
    }
  }

  // Sums the accumulators of a cluster's CTAs, in the order of their ranks, each CTA a share of the
  // units. `s_sums` is free shared memory of kTileM * 256 bytes.
  __device__ __forceinline__ void reduce_and_finish(const Acc& acc, void* s_sums, int first_row,
                                                    int first_m) const {
    const int thread = static_cast<int>(threadIdx.x);
    auto* s_mine = static_cast<float4*>(s_sums);  // [unit][2][thread]
    device::named_barrier_sync(1, kThreads);      // every warp's wgmma has read that memory
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float v[8];
      take_unit(v, acc, unit / 2, unit % 2);
      s_mine[unit * 2 * kThreads + thread] = make_float4(v[0], v[1], v[2], v[3]);
      s_mine[(unit * 2 + 1) * kThreads + thread] = make_float4(v[4], v[5], v[6], v[7]);
    }
    device::cluster_sync();
    if (args.cand_to_user != nullptr) device::grid_dependency_wait();
    const int share = kUnits * kThreads / args.split_k;
    const int begin = device::cluster_rank() * share;
    for (int item = begin + thread; item < begin + share; item += kThreads) {
      const int unit = item / kThreads;
      const int source = item % kThreads;
      float v[8] = {};
      for (int rank = 0; rank < args.split_k; ++rank) {
        const std::uint32_t s_theirs = device::cluster_address(
            device::smem_address(s_mine + unit * 2 * kThreads + source), rank);
        const float4 low = device::load_cluster(s_theirs);
        const float4 high = device::load_cluster(s_theirs + kThreads * sizeof(float4));
        v[0] += low.x, v[1] += low.y, v[2] += low.z, v[3] += low.w;
        v[4] += high.x, v[5] += high.y, v[6] += high.z, v[7] += high.w;
      }
      const int i = source / 32 * 16 + source % 32 / 4 + unit % 2 * 8;
      finish_unit(v, first_row + i, first_m + unit / 2 * 32 + source % 4 * 8);
    }
    device::cluster_sync();  // no CTA leaves while another reads its sums
  }
};

}  // namespace ikbo::linear_impl
