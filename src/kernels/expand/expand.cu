// SPDX-License-Identifier: Apache-2.0
// Copies whole rows of bytes. A group of threads takes one candidate; a CTA takes several, or, by
// blockIdx.y, a part of one long row.
#include <algorithm>
#include <cstdint>

#include "ikbo/expand.h"
#include "kernels/expand/expand_layout.h"
#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"

namespace ikbo {
namespace expand_impl {
namespace {

template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const ExpandParams params, int threads_per_row, std::int64_t row_vectors) {
  const int thread = static_cast<int>(threadIdx.x) % threads_per_row;
  const int rows_per_cta = kThreads / threads_per_row;
  const int step = threads_per_row * kUnroll;
  for (std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * rows_per_cta +
                        static_cast<int>(threadIdx.x) / threads_per_row;
       b < params.num_candidates; b += static_cast<std::int64_t>(gridDim.x) * rows_per_cta) {
    const auto* source = reinterpret_cast<const Vector*>(
        static_cast<const char*>(params.x_user) + params.cand_to_user[b] * params.user_stride);
    auto* target = static_cast<Vector*>(params.out) + b * row_vectors;
    for (std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * step + thread;
         first < row_vectors; first += static_cast<std::int64_t>(gridDim.y) * step) {
      Vector values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const std::int64_t at = first + i * threads_per_row;
        if (at < row_vectors) values[i] = source[at];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const std::int64_t at = first + i * threads_per_row;
        if (at < row_vectors) target[at] = values[i];
      }
    }
  }
}

template <typename Vector>
void run(const ExpandParams& params, const ExpandConfig& config, cudaStream_t stream) {
  const std::int64_t row_vectors = params.row_bytes / static_cast<std::int64_t>(sizeof(Vector));
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t rows_per_cta = kThreads / config.threads_per_row;
  // The kernel's loops take what is past the largest grid.
  const dim3 grid(
      static_cast<unsigned>(ceil_div(params.num_candidates, rows_per_cta)),
      static_cast<unsigned>(std::min<std::int64_t>(
          ceil_div(row_vectors, std::int64_t{config.threads_per_row} * kUnroll), 65535)));
  host::launch("ikbo::expand", expand_kernel<Vector>, {.grid = grid, .threads = kThreads}, stream,
               params, config.threads_per_row, row_vectors);
}

}  // namespace
}  // namespace expand_impl

void expand(const ExpandParams& params, const ExpandConfig& config, Stream stream) {
  if (params.num_candidates == 0 || params.row_bytes == 0) return;
  host::check_indices("expand", params.cand_to_user, params.num_candidates, params.num_users,
                      stream);
  switch (config.vector_bytes) {
    case 16:
      return expand_impl::run<uint4>(params, config, stream);
    case 8:
      return expand_impl::run<uint2>(params, config, stream);
    case 4:
      return expand_impl::run<std::uint32_t>(params, config, stream);
    case 2:
      return expand_impl::run<std::uint16_t>(params, config, stream);
    default:
      return expand_impl::run<std::uint8_t>(params, config, stream);
  }
}

}  // namespace ikbo
