// SPDX-License-Identifier: Apache-2.0
// The small matrix product inside target attention, and the packing of its operands.
//
// An element of c is one chain of multiply-adds over ascending k, whatever the shape of the
// register tile that computes it: results do not depend on how rows are grouped.
#pragma once

#include "cpu/target_attention_vec.h"

namespace ikbo::cpu::IKBO_ISA {

// Register tile: kTileRows x kTileVecs accumulators, of 32 (AVX-512) or 16 vector registers.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVecs = kVecBytes == 64 ? 4 : 2;
template <class T>
inline constexpr int kPanel = kTileVecs * kLanes<T>;  // columns of one register tile

enum class Start { kZero, kAccumulate, kScale };

// c[r, :] = start(c[r, :]) + sum_k a[r, k] * b[k, :], where b is stored as panels of kPanel
// columns.
template <class T>
struct Gemm {
  const T* a = nullptr;
  std::int64_t a_row = 0;  // distance between rows of a
  std::int64_t a_k = 0;    // distance between columns of a
  const T* b = nullptr;
  std::int64_t b_k = 0;      // distance between rows of one panel
  std::int64_t b_panel = 0;  // distance between panels
  int n_k = 0;
  T* c = nullptr;
  std::int64_t c_row = 0;
  Start start = Start::kZero;
  const T* row_scale = nullptr;  // [rows], for kScale
};

template <class T, int kRows, int kVecs>
void gemm_tile(const Gemm<T>& g, const T* a, const T* b, T* c, const T* row_scale) {
  Vec<T> acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      acc[r][j] = Vec<T>{};
    }
  }
  if (g.start != Start::kZero) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> scale = broadcast(g.start == Start::kScale ? row_scale[r] : T{1});
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        acc[r][j] = load(c + r * g.c_row + j * kLanes<T>) * scale;
      }
    }
  }
  for (int k = 0; k < g.n_k; ++k) {
    Vec<T> b_vec[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      b_vec[j] = load(b + j * kLanes<T>);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a_vec = broadcast(a[r * g.a_row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        acc[r][j] = multiply_add<T>(a_vec, b_vec[j], acc[r][j]);
      }
    }
    a += g.a_k;
    b += g.b_k;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      store<T>(c + r * g.c_row + j * kLanes<T>, acc[r][j]);
    }
  }
}

template <class T, int kRows = kTileRows, int kVecs = kTileVecs>
void gemm_tile_of(int rows, int vecs, const Gemm<T>& g, const T* a, const T* b, T* c,
                  const T* row_scale) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return gemm_tile_of<T, kRows - 1, kVecs>(rows, vecs, g, a, b, c, row_scale);
    }
  }
  if constexpr (kVecs > 1) {
    if (vecs < kVecs) {
      return gemm_tile_of<T, kRows, kVecs - 1>(rows, vecs, g, a, b, c, row_scale);
    }
  }
  gemm_tile<T, kRows, kVecs>(g, a, b, c, row_scale);
}

// All of c: `rows` rows of `vecs` vectors.
template <class T>
void gemm(const Gemm<T>& g, int rows, int vecs) {
  for (int j = 0; j < vecs; j += kTileVecs) {
    const T* b = g.b + j / kTileVecs * g.b_panel;
    const int tile_vecs = vecs - j < kTileVecs ? vecs - j : kTileVecs;
    for (int r = 0; r < rows; r += kTileRows) {
      const int tile_rows = rows - r < kTileRows ? rows - r : kTileRows;
      gemm_tile_of<T>(tile_rows, tile_vecs, g, g.a + r * g.a_row, b,
                      g.c + r * g.c_row + j * kLanes<T>,
                      g.row_scale == nullptr ? nullptr : g.row_scale + r);
    }
  }
}

// c[r, :] = start(c[r, :]) + sum_{k < counts[r]} a[r, k] * b[k, :], counts ascending. A tile's rows
// share the first counts; what one row has beyond them is added for it alone.
template <class T>
void gemm_ragged(Gemm<T> g, const int* counts, int rows, int vecs) {
  const Gemm<T> whole = g;
  for (int r = 0; r < rows; r += kTileRows) {
    const int tile_rows = rows - r < kTileRows ? rows - r : kTileRows;
    const int common = counts[r];
    g = whole;
    g.a += r * g.a_row;
    g.c += r * g.c_row;
    g.row_scale = whole.row_scale == nullptr ? nullptr : whole.row_scale + r;
    g.n_k = common;
    gemm(g, tile_rows, vecs);
    g.start = Start::kAccumulate;
    g.a += common * g.a_k;
    g.b += common * g.b_k;
    for (int i = 1; i < tile_rows; ++i) {
      g.a += g.a_row;
      g.c += g.c_row;
      g.n_k = counts[r + i] - common;
      if (g.n_k > 0) {
        gemm(g, 1, vecs);
      }
    }
  }
}

// Rows of one user's keys or values for one kv head, addressed by their place among the keys that
// count.
template <class Storage>
struct KeyRows {
  const Storage* data;
  std::int64_t stride_key;
  std::int64_t stride_dim;
  const std::int32_t* positions;  // may be nullptr

  const Storage* row(std::int64_t key) const {
    return data + (positions == nullptr ? key : positions[key]) * stride_key;
  }
};

template <class Storage>
inline void prefetch_row(const KeyRows<Storage>& rows, std::int64_t key, int dim) {
  const char* row = reinterpret_cast<const char*>(rows.row(key));
  for (int byte = 0; byte < dim * static_cast<int>(sizeof(Storage)); byte += 64) {
    __builtin_prefetch(row + byte);
  }
}

template <class T>
inline constexpr int round_up(int n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// Elements that `rows` rows of `columns` take as panels.
template <class T>
inline constexpr std::int64_t panels_size(int rows, int columns) {
  return std::int64_t{rows} * ((columns + kPanel<T> - 1) / kPanel<T> * kPanel<T>);
}

// dst[panel, key, column in panel] = rows key0 ... key0 + n - 1, widened, `panel_size` elements
// apart; the last panel is zero-filled to a whole number of vectors.
template <class T, class Storage>
void pack_panels(const KeyRows<Storage>& rows, std::int64_t key0, int n, int dim, T* dst,
                 std::int64_t panel_size) {
  for (int i = 0; i < n; ++i) {
    const Storage* src = rows.row(key0 + i);
    T* out = dst + std::int64_t{i} * kPanel<T>;
    for (int d = 0; d < dim; d += kPanel<T>) {
      const int width = dim - d < kPanel<T> ? dim - d : kPanel<T>;
      load_row(src + d * rows.stride_dim, rows.stride_dim, width, out, round_up<T>(width));
      out += panel_size;
    }
  }
}

// dst[panel, d, key in panel] = the same rows transposed: panels of kPanel keys, zero-filled to a
// whole number of vectors. `staging` holds kLanes rows of round_up(dim) elements.
template <class T, class Storage>
void pack_transposed(const KeyRows<Storage>& rows, std::int64_t key0, int n, int dim, T* staging,
                     T* dst) {
  constexpr int kW = kLanes<T>;
  const int padded = round_up<T>(dim);
  const bool direct = std::is_same_v<T, Storage> && rows.stride_dim == 1 && dim == padded;
  for (int i = 0; i < n; i += kW) {
    const T* src[kW];
    for (int lane = 0; lane < kW; ++lane) {
      T* staged = staging + lane * padded;
      src[lane] = staged;
      if (i + lane >= n) {
        load_row<T>(rows.data, 1, 0, staged, padded);
      } else if (direct) {
        src[lane] = reinterpret_cast<const T*>(rows.row(key0 + i + lane));
      } else {
        load_row(rows.row(key0 + i + lane), rows.stride_dim, dim, staged, padded);
      }
    }
    for (int ahead = i + kW; ahead < i + 2 * kW && ahead < n; ++ahead) {
      prefetch_row(rows, key0 + ahead, dim);
    }
    T* out = dst + i / kPanel<T> * std::int64_t{dim} * kPanel<T> + i % kPanel<T>;
    for (int d = 0; d < dim; d += kW) {
      Vec<T> square[kW];
#pragma GCC unroll 16
      for (int lane = 0; lane < kW; ++lane) {
        square[lane] = load(src[lane] + d);
      }
      transpose<T>(square);
#pragma GCC unroll 16
      for (int lane = 0; lane < kW; ++lane) {
        if (d + lane < dim) {
          store<T>(out + std::int64_t{d + lane} * kPanel<T>, square[lane]);
        }
      }
    }
  }
}

}  // namespace ikbo::cpu::IKBO_ISA
