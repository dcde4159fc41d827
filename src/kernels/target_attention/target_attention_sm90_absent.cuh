// SPDX-License-Identifier: Apache-2.0
// The results of a history's own queries at or past the user's length, which are in no tile: zeros
// and a log-sum-exp of -inf.
#pragma once

#include "kernels/device/ptx_mma.cuh"
#include "kernels/target_attention/target_attention_sm90_cta.cuh"

namespace ikbo::target_attention_impl {

template <typename Traits>
struct Sm90AbsentRows : Sm90Cta<Traits> {
  using Cta = Sm90Cta<Traits>;
  using Element = typename Traits::Element;
  using Cta::params;

  static constexpr int kQueriesAtOnce = 64;

  // By one warp of every CTA.
  __device__ __forceinline__ void fill(int lane) const {
    const std::int32_t* lengths = params.args.histories.user_lengths;
    if (lengths == nullptr) return;
    const int num_queries = params.args.histories.num_keys;
    const int parts = (num_queries + kQueriesAtOnce - 1) / kQueriesAtOnce;
    const int end = params.args.num_users * parts;
    for (int i = static_cast<int>(blockIdx.x); i < end; i += static_cast<int>(gridDim.x)) {
      const int user = i / parts;
      const int first = (i - user * parts) * kQueriesAtOnce;
      const int last = min(first + kQueriesAtOnce, num_queries);
      const int length = lengths[user];
      zero(user, max(first, stored_queries(length)), last, lane);
      fill_lse(user, max(first, length), last, lane);
    }
  }

 private:
  // Queries of a user that the boxes of its tiles cover.
  __device__ __forceinline__ int stored_queries(int length) const {
    const OwnArgs& own = params.own;
    const int group = params.args.group;
    if (own.box_rows == 0) return length;
    const int boxes = own.divide_by_box(length * group + own.box_rows - 1);
    return params.args.divide_by_group(boxes * own.box_rows);
  }

  __device__ __forceinline__ void zero(int user, int first, int last, int lane) const {
    const std::int64_t vectors_of_query =
        std::int64_t{params.args.num_heads} * (params.args.head_dim / 8);
    const std::int64_t row = std::int64_t{user} * params.args.histories.num_keys;
    auto* g_vectors = static_cast<uint4*>(params.own.out);
    const std::int64_t end = (row + last) * vectors_of_query;
    for (std::int64_t i = (row + first) * vectors_of_query + lane; i < end; i += 32) {
      device::store_global(g_vectors + i, make_uint4(0, 0, 0, 0));
    }
  }

  __device__ __forceinline__ void fill_lse(int user, int first, int last, int lane) const {
    const int num_queries = params.args.histories.num_keys;
    for (int head = 0; head < params.args.num_heads; ++head) {
      float* g_lse =
          params.own.lse + (std::int64_t{user} * params.args.num_heads + head) * num_queries;
      for (int query = first + lane; query < last; query += 32) {
        g_lse[query] = -__builtin_huge_valf();
      }
    }
  }
};

}  // namespace ikbo::target_attention_impl
