// SPDX-License-Identifier: Apache-2.0
// The gradients of ikbo::target_attention on CUDA: lists the users' candidates, tiles and keys,
// sums up what every score of a row needs, and launches the products.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ikbo/error.h"
#include "ikbo/target_attention_backward_cuda.h"
#include "kernels/device/block_sums.cuh"
#include "kernels/host/launch.h"
#include "kernels/target_attention_backward/target_attention_backward_launch.h"

namespace ikbo {
namespace target_attention_backward_impl {
namespace {

// Where the candidates and the tiles of each user begin, and its keys. One CTA.
__global__ void __launch_bounds__(kListThreads, 1)
    target_attention_backward_list_kernel(const __grid_constant__ Args args) {
  __shared__ int s_warps[kListThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const auto user_at = [&](int i) {
    if (i < 0) return -1;
    return i < args.num_candidates ? args.cand_to_user[args.order[i]] : args.num_users;
  };
  for (int i = thread; i <= args.num_candidates; i += kListThreads) {
    const int user = user_at(i);
    for (int u = user_at(i - 1) + 1; u <= user; ++u) args.first_cands[u] = i;
  }
  __syncthreads();
  for (int u = thread / 32; u < args.num_users; u += kListThreads / 32) {
    int keys = args.num_keys;
    if (args.cand_lengths != nullptr) {
      keys = 0;
      for (int i = args.first_cands[u] + thread % 32; i < args.first_cands[u + 1]; i += 32) {
        keys = max(keys, args.cand_lengths[args.order[i]]);
      }
      keys = __reduce_max_sync(~0u, keys);
    }
    if (args.user_lengths != nullptr) keys = min(keys, args.user_lengths[u]);
    if (thread % 32 == 0) args.num_keys_of_users[u] = keys;
  }
  int before_round = 0;
  for (int first = 0; first <= args.num_users; first += kListThreads) {
    const int u = first + thread;
    const int rows =
        u < args.num_users ? args.rows_of(args.first_cands[u + 1] - args.first_cands[u]) : 0;
    const auto sums =
        device::sums_of_block<kListThreads>((rows + kTileRows - 1) / kTileRows, s_warps);
    if (u <= args.num_users) args.first_tiles[u] = before_round + sums.before;
    before_round += sums.total;
  }
}

// row_terms; a warp for each row.
template <typename Element>
__global__ void __launch_bounds__(256)
    target_attention_backward_terms_kernel(const __grid_constant__ Args args) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * 256 + threadIdx.x) / 32;  // (b, query, head)
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t rows_of_cand = std::int64_t{args.num_queries} * args.num_heads;
  if (row >= rows_of_cand * args.num_candidates) return;
  const auto* g_out = static_cast<const Element*>(args.out) + row * args.head_dim;
  const auto* g_grad = static_cast<const Element*>(args.grad_out) + row * args.head_dim;
  float sum = 0;
  for (int d = lane * 2; d < args.head_dim; d += 64) {
    sum = fmaf(static_cast<float>(g_out[d]), static_cast<float>(g_grad[d]), sum);
    sum = fmaf(static_cast<float>(g_out[d + 1]), static_cast<float>(g_grad[d + 1]), sum);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (lane > 0) return;
  const std::int64_t cand = row / rows_of_cand;
  const std::int64_t of_cand = row - cand * rows_of_cand;
  const std::int64_t query = of_cand / args.num_heads;
  const std::int64_t head = of_cand - query * args.num_heads;
  const std::int64_t at = cand * rows_of_cand + head * args.num_queries + query;
  args.row_terms[at] = sum - args.grad_lse[at];
}

Args make_args(const TargetAttentionGradParams& params, const std::int64_t* order,
               unsigned char* workspace) {
  const TargetAttentionParams& p = params.forward;
  const WorkspaceLayout layout = make_workspace_layout(p);
  const auto ints = [&](std::size_t offset) {
    return reinterpret_cast<std::int32_t*>(workspace + offset);
  };
  return {.q = p.q,
          .k = p.k,
          .v = p.v,
          .out = p.out,
          .grad_out = params.grad_out,
          .lse = static_cast<const float*>(p.lse),
          .grad_lse = static_cast<const float*>(params.grad_lse),
          .row_terms = reinterpret_cast<float*>(workspace + layout.row_terms),
          .grad_q = params.grad_q,
          .grad_k = params.grad_k,
          .grad_v = params.grad_v,
          .cand_to_user = p.cand_to_user,
          .order = order,
          .first_cands = ints(layout.first_cands),
          .first_tiles = ints(layout.first_tiles),
          .num_keys_of_users = ints(layout.num_keys),
          .user_lengths = p.user_lengths,
          .cand_lengths = p.cand_lengths,
          .num_users = p.num_users,
          .num_candidates = p.num_candidates,
          .num_queries = p.num_queries,
          .num_keys = p.num_keys,
          .num_heads = p.num_heads,
          .num_kv_heads = p.num_kv_heads,
          .group = p.num_heads / p.num_kv_heads,
          .head_dim = p.head_dim,
          .scale = static_cast<float>(p.scale),
          .scale_log2 = static_cast<float>(p.scale * 1.4426950408889634),
          .divide_by_group = device::FastDivide(p.num_heads / p.num_kv_heads),
          .divide_by_queries = device::FastDivide(p.num_queries)};
}

template <typename Element>
void launch_all(const Args& args, const TargetAttentionParams& p,
                const TargetAttentionBackwardConfig& config, cudaStream_t stream) {
  host::launch("ikbo::target_attention (backward, list)", target_attention_backward_list_kernel,
               {.grid = dim3(1), .threads = kListThreads}, stream, args);
  const std::int64_t rows = std::int64_t{p.num_candidates} * p.num_queries * p.num_heads;
  host::launch("ikbo::target_attention (backward, terms)",
               target_attention_backward_terms_kernel<Element>,
               {.grid = dim3(static_cast<unsigned>((rows + 7) / 8)), .threads = 256}, stream, args);
  launch_products<Element>(args, config, max_row_tiles(p), stream);
}

}  // namespace
}  // namespace target_attention_backward_impl

void target_attention_backward(const TargetAttentionGradParams& params,
                               const TargetAttentionBackwardConfig& config,
                               const std::int64_t* order, void* workspace, Stream stream) {
  IKBO_CHECK(config.head_dim > 0, "ikbo::target_attention: a CUDA kernel is needed; got ",
             to_string(config));
  const auto args = target_attention_backward_impl::make_args(
      params, order, static_cast<unsigned char*>(workspace));
  if (params.forward.dtype == DType::kFloat16) {
    target_attention_backward_impl::launch_all<__half>(args, params.forward, config, stream);
  } else {
    target_attention_backward_impl::launch_all<__nv_bfloat16>(args, params.forward, config, stream);
  }
}

}  // namespace ikbo
