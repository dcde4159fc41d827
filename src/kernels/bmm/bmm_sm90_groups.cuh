// SPDX-License-Identifier: Apache-2.0
// Lists the candidates by user in the shared memory of each CTA: a few microseconds less than a
// kernel ahead that all CTAs wait for. A sorted batch is such a list.
#pragma once

#include "kernels/bmm/bmm_sm90_cta.cuh"
#include "kernels/device/block_sums.cuh"
#include "kernels/device/cta_ranks.cuh"
#include "kernels/device/cta_user_list.cuh"
#include "kernels/device/ptx_l2.cuh"
#include "kernels/device/ptx_tma.cuh"

namespace ikbo::bmm_impl {

template <typename Traits>
struct Sm90Groups {
  static constexpr int kNumThreads = Traits::kNumThreads;
  using UserList = device::CtaUserList<kNumThreads>;
  using Ranks = device::CtaRanks<kNumThreads>;

  // Lies where the user matrices, stages and staging do, until the first load.
  struct Scratch {
    typename UserList::Storage users;  // of the candidates
    typename Ranks::Storage ranks;
    alignas(8) std::uint16_t cands[device::kMaxCandsOfCta];  // user by user
    std::uint16_t first_cands[device::kMaxUsersOfCta];       // of each user
  };
  // Of a tensor that a CTA asks L2 for: while candidates are listed, memory would be idle.
  static constexpr int kBytesAhead = 32 * 1024;
  static_assert(sizeof(Scratch) <= Traits::kUserBlockBytes + kLeastStages * kStageBytes +
                                       kConsumers * kStagingBuffers * kStagingBytes);

  // By all threads of the CTA, before its first barrier.
  __device__ __forceinline__ static void begin(const Sm90Cta<Traits>& cta, unsigned char* s_raw) {
    user_list(cta, s_raw).begin();
    ask_ahead(cta.params.args.b_ahead);
    ask_ahead(cta.params.args.a_ahead);
  }

  // By all threads of the CTA, after its first barrier.
  __device__ __forceinline__ static CandList list(const Sm90Cta<Traits>& cta,
                                                  unsigned char* s_raw) {
    const UserList users = user_list(cta, s_raw);
    OwnList& own = own_list(cta, s_raw);
    const Sm90Args& args = cta.params.args;
    const Positions share = share_of(cta);
    const int count = share.end - share.begin;
    const bool is_own = count <= kOwnCands;
    users.wait();
    if (is_own && thread() < count) own.users[thread()] = user_at(s_raw, share.begin + thread());
    device::fence_smem_to_async();
    if (__syncthreads_and(is_sorted(users) ? 1 : 0) != 0) {
      return {nullptr, is_own ? own.users - share.begin : args.cand_to_user, share.end};
    }
    return list_unsorted(args.num_users, args.num_candidates, share, args.grouped_cands, own);
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ static OwnList& own_list(const Sm90Cta<Traits>& cta,
                                                      unsigned char* s_raw) {
    return *reinterpret_cast<OwnList*>(s_raw + (cta.own_list() - cta.s_base));
  }
  __device__ __forceinline__ static UserList user_list(const Sm90Cta<Traits>& cta,
                                                       unsigned char* s_raw) {
    const Sm90Args& args = cta.params.args;
    return {reinterpret_cast<Scratch*>(s_raw)->users, own_list(cta, s_raw).users_loaded,
            args.cand_to_user, args.num_candidates};
  }

  __device__ __forceinline__ static int user_at(const unsigned char* s_raw, int cand) {
    return reinterpret_cast<const Scratch*>(s_raw)->users.users[cand];
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

  // Whether this thread's candidates are sorted.
  __device__ __forceinline__ static bool is_sorted(const UserList& users) {
    bool is_sorted = true;
#pragma unroll 1
    for (int v = thread(); v < users.num_vectors(); v += kNumThreads) {
      const auto [before, u] = users.vector_at(v);
      is_sorted = is_sorted && before <= u.x && u.x <= u.y && u.y <= u.z && u.z <= u.w;
    }
    return is_sorted;
  }

  static_assert(kOwnCands <= kNumThreads);

  // Positions in the list that a CTA looks at.
  struct Positions {
    int begin;
    int end;
  };
  __device__ __forceinline__ static Positions share_of(const Sm90Cta<Traits>& cta) {
    const Sm90Args& args = cta.params.args;
    const auto share = Sm90Cta<Traits>::share_of_cta(args);
    if (share.columns == 0) return {0, 0};
    const int begin = args.divide_by_n(share.column);
    const int last = share.column + share.columns - 1;
    // Past the end come those of the next tile of P, from the beginning.
    if (last >= args.num_grains * args.grain) return {0, args.num_candidates};
    return {begin, min(args.divide_by_n(last) + 1, args.num_candidates)};
  }

  // In the CTA's shared memory, or where its share does not fit there in the list of all CTAs,
  // where those that have a candidate in common write the same.
  // NOTE: inlined, its branches could make the compiler keep the consumers' loop in registers of
  // each thread instead of those of the warp. Arguments go by value: the kernel's own, read through
  // an address, come from far.
  __device__ __noinline__ static CandList list_unsorted(int num_users, int num_candidates,
                                                        Positions share, std::int32_t* all_cands,
                                                        OwnList& own) {
    extern __shared__ __align__(1024) unsigned char s_raw[];
    auto& scratch = *reinterpret_cast<Scratch*>(s_raw);
    const Ranks ranks{scratch.ranks, scratch.users.users, num_users, num_candidates};
    ranks.count();
    __syncthreads();
#pragma unroll 1
    for (int u = thread(); u < num_users; u += kNumThreads) {
      scratch.first_cands[u] = static_cast<std::uint16_t>(ranks.sum_up(u));
    }
    __syncthreads();
    if (thread() < 32) place_users(scratch.first_cands, num_users);
    __syncthreads();
    ranks.list(scratch.first_cands, scratch.cands);
    __syncthreads();
    const bool is_own = share.end - share.begin <= kOwnCands;
    std::int32_t* cands = is_own ? own.cands - share.begin : all_cands;
    std::int32_t* users = is_own ? own.users - share.begin : nullptr;
#pragma unroll 1
    for (int at = share.begin + thread(); at < share.end; at += kNumThreads) {
      const int cand = scratch.cands[at];
      cands[at] = cand;
      if (is_own) users[at] = scratch.users.users[cand];
    }
    device::fence_smem_to_async();
    __syncthreads();
    return {cands, users, share.end};
  }

  // From the counts of all users to the positions of their first candidates, by one warp.
  __device__ __forceinline__ static void place_users(std::uint16_t* counts, int num_users) {
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < num_users; first += 32) {
      const int user = first + thread();
      const int count = user < num_users ? counts[user] : 0;
      const int sum = before + device::inclusive_sum_of_warp(count);
      if (user < num_users) counts[user] = static_cast<std::uint16_t>(sum - count);
      before = __shfl_sync(~0u, sum, 31);
    }
  }
};

}  // namespace ikbo::bmm_impl
