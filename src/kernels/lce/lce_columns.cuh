// SPDX-License-Identifier: Apache-2.0
// What the generic LCE kernels share. A stage is one matrix product per batch entry,
//   out[b] = w e[b] + bias                        user stage, out in fp32
//   out[b] = w e[b] + add[cand_to_user[b]]        candidate stage
// seen as one product with B x N columns, so that no tile is cut short by a small N.
#pragma once

#include <cstdint>

namespace ikbo::lce_impl {

struct StageArgs {
  const void* e;     // [batch, K, N]
  const void* w;     // [M, K]
  const void* bias;  // [M]; may be nullptr
  const float* add;  // [U, M, N]; nullptr in the user stage
  const std::int32_t* cand_to_user;
  void* out;  // [batch, M, N] contiguous
  std::int64_t stride_e_batch;
  std::int64_t stride_e_k;
  std::int64_t stride_e_n;
  std::int64_t stride_w_m;
  std::int64_t stride_w_k;
  std::int64_t num_columns;  // batch x N
  int m;
  int n;
  int k;
  // lce_mma alone.
  int e_width;     // elements per copy along N: 8, 2 or 1
  int w_width;     // along K
  bool e_k_inner;  // K is the inner dimension of e: copies of one element go along it
  bool w_m_inner;  // M is the inner dimension of w: likewise
  bool out_pairs;  // columns 2 i and 2 i + 1 are neighbours in `out`, aligned to both
};

// Offsets of one column, in elements.
struct Column {
  std::int64_t e;
  std::int64_t out;  // of row 0; negative past the last column
  std::int64_t add;
};

__device__ __forceinline__ Column locate_column(const StageArgs& args, std::int64_t column) {
  if (column >= args.num_columns) return {0, -1, 0};
  const std::int64_t b = column / args.n;
  const std::int64_t at_n = column - b * args.n;
  const std::int64_t out_size = static_cast<std::int64_t>(args.m) * args.n;
  const std::int64_t user = args.add != nullptr ? args.cand_to_user[b] : 0;
  return {b * args.stride_e_batch + at_n * args.stride_e_n, b * out_size + at_n,
          user * out_size + at_n};
}

}  // namespace ikbo::lce_impl
