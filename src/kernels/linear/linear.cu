// SPDX-License-Identifier: Apache-2.0
// ikbo::linear on CUDA: copies weights whose strides do not suit, then user stage and candidate
// stage of the chosen kernel.
#include <cstdint>

#include "ikbo/linear.h"
#include "kernels/device/ptx_tma.cuh"
#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"
#include "kernels/linear/linear_generic.h"
#include "kernels/linear/linear_layout.h"
#include "kernels/linear/linear_sm90_launch.h"

namespace ikbo {
namespace linear_impl {
namespace {

struct CopyArgs {
  const std::uint16_t* from;  // [M, K]
  std::uint16_t* to;          // [M, copied_stride(K)]
  std::int64_t stride_m;
  std::int64_t stride_k;
  std::int64_t count;  // elements of `to`; 0: nothing to copy
  int k;
  int to_stride;
};

__device__ __forceinline__ void copy_element(const CopyArgs& args, std::int64_t at) {
  const std::int64_t m = at / args.to_stride;
  const int k = static_cast<int>(at % args.to_stride);
  if (k < args.k) args.to[at] = args.from[m * args.stride_m + k * args.stride_k];
}

// Both weights of a call in one launch.
__global__ void copy_weights_kernel(const CopyArgs first, const CopyArgs second) {
  device::grid_dependency_launch();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < first.count) {
    copy_element(first, at);
  } else if (at < first.count + second.count) {
    copy_element(second, at - first.count);
  }
}

void launch_copy(const CopyArgs& first, const CopyArgs& second, cudaStream_t stream) {
  constexpr int kCopyThreads = 256;
  const std::int64_t count = first.count + second.count;
  if (count == 0) return;
  const auto num_ctas = ceil_div<std::int64_t>(count, kCopyThreads);
  host::launch("ikbo::linear (copy of the weights)", copy_weights_kernel,
               {.grid = dim3(static_cast<unsigned>(num_ctas)), .threads = kCopyThreads}, stream,
               first, second);
}

CopyArgs make_copy(const LinearParams& p, const void* w, std::int64_t stride_m,
                   std::int64_t stride_k, int k, void* to) {
  const std::int64_t to_stride = copied_stride(k);
  return {.from = static_cast<const std::uint16_t*>(w),
          .to = static_cast<std::uint16_t*>(to),
          .stride_m = stride_m,
          .stride_k = stride_k,
          .count = p.m * to_stride,
          .k = k,
          .to_stride = static_cast<int>(to_stride)};
}

void launch_tiling(const StageLaunch& launch) {
  switch (launch.tiling.tile_m) {
    case 64:
      return launch_sm90<64>(launch);
    case 128:
      return launch_sm90<128>(launch);
    case 160:
      return launch_sm90<160>(launch);
    case 192:
      return launch_sm90<192>(launch);
    case 224:
      return launch_sm90<224>(launch);
    case 256:
      return launch_sm90<256>(launch);
    default:
      detail::throw_error(__FILE__, __LINE__, "ikbo::linear: no linear_sm90 kernel with tile_m ",
                          launch.tiling.tile_m, "; there are 64, 128, 160, 192, 224, 256");
  }
}

void run_sm90(const LinearParams& p, const LinearConfig& config, const DeviceLimits& limits,
              cudaStream_t stream) {
  const WorkspaceLayout layout = make_workspace_layout(p, config);
  auto* workspace = static_cast<unsigned char*>(p.workspace);
  RowMatrix w_user{p.w_user, p.stride_w_user_m, p.m, p.k_user, config.w_user};
  RowMatrix w_cand{p.w_cand, p.stride_w_cand_m, p.m, p.k_cand, config.w_cand};
  CopyArgs copy_user{};
  CopyArgs copy_cand{};
  if (config.w_user == LinearFeed::kCopied) {
    w_user = {workspace + layout.w_user_copy, copied_stride(p.k_user), p.m, p.k_user,
              LinearFeed::kTma};
    copy_user = make_copy(p, p.w_user, p.stride_w_user_m, p.stride_w_user_k, p.k_user,
                          workspace + layout.w_user_copy);
  }
  if (config.w_cand == LinearFeed::kCopied) {
    w_cand = {workspace + layout.w_cand_copy, copied_stride(p.k_cand), p.m, p.k_cand,
              LinearFeed::kTma};
    copy_cand = make_copy(p, p.w_cand, p.stride_w_cand_m, p.stride_w_cand_k, p.k_cand,
                          workspace + layout.w_cand_copy);
  }
  launch_copy(copy_user, copy_cand, stream);
  StageLaunch launch{.params = p,
                     .stage = Stage::kUser,
                     .tiling = config.user,
                     .x = {p.x_user, p.stride_x_user_u, p.num_users, p.k_user, config.x_user},
                     .w = w_user,
                     .user_partial = reinterpret_cast<float*>(workspace + layout.user_partial),
                     .partial_columns = partial_columns(p, config),
                     .num_sms = limits.num_sms,
                     .copies_weights = copy_user.count + copy_cand.count > 0,
                     .stream = stream};
  launch_tiling(launch);
  launch.stage = Stage::kCandidate;
  launch.tiling = config.candidate;
  launch.x = {p.x_cand, p.stride_x_cand_b, p.num_candidates, p.k_cand, config.x_cand};
  launch.w = w_cand;
  launch_tiling(launch);
}

}  // namespace
}  // namespace linear_impl

void linear(const LinearParams& params, const LinearConfig& config, const DeviceLimits& limits,
            Stream stream) {
  if (params.num_candidates == 0 || params.m == 0) return;
  host::check_indices("linear", params.cand_to_user, params.num_candidates, params.num_users,
                      stream);
  if (config.kernel == LinearKernel::kSm90) {
    linear_impl::run_sm90(params, config, limits, stream);
  } else {
    linear_impl::run_generic(params, limits, stream);
  }
}

}  // namespace ikbo
