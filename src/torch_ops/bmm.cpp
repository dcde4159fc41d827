// SPDX-License-Identifier: Apache-2.0
// ikbo::bmm: schema, checks, CPU and CUDA kernels, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/bmm_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <limits>

#include "common/kernel_trace.h"
#include "ikbo/bmm_cuda.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

Tensor oriented(const Tensor& t, bool is_transposed) {
  return is_transposed ? torch::stable::transpose(t, 1, 2) : t;
}

// a and b already oriented: a [U, P, R], b [B, R, N].
void check_bmm_shapes(const Tensor& a, const Tensor& b, const Tensor& cand_to_user) {
  constexpr const char* kOp = "bmm";
  STD_TORCH_CHECK(a.size(2) == b.size(1), "ikbo::bmm: b_cand must have R = ", a.size(2),
                  " rows per candidate (= the columns of a_user, after the transposes asked for); "
                  "got ",
                  b.size(1));
  check_shape(kOp, {"cand_to_user", cand_to_user}, {{"B", b.size(0)}});
}

void check_bmm(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user) {
  constexpr const char* kOp = "bmm";
  const Named a{"a_user", a_user};
  const Named b{"b_cand", b_cand};
  const Named index{"cand_to_user", cand_to_user};
  check_devices(kOp, {a, b, index});
  check_float_dtypes(kOp, {a, b});
  check_dtype(kOp, index, ScalarType::Int);
  check_rank(kOp, a, 3, "[U, P, R]");
  check_rank(kOp, b, 3, "[B, R, N]");
  check_rank(kOp, index, 1, "[B]");
}

Tensor bmm_cpu(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user,
               bool transpose_a, bool transpose_b) {
  check_bmm(a_user, b_cand, cand_to_user);
  const Tensor a = oriented(a_user, transpose_a);
  const Tensor b = oriented(b_cand, transpose_b);
  check_bmm_shapes(a, b, cand_to_user);
  return cpu::bmm(a, b, cand_to_user);
}

Tensor bmm_composite(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user,
                     bool transpose_a, bool transpose_b) {
  check_bmm(a_user, b_cand, cand_to_user);
  const Tensor a = oriented(a_user, transpose_a);
  const Tensor b = oriented(b_cand, transpose_b);
  check_bmm_shapes(a, b, cand_to_user);
  return composite::bmm(a, b, cand_to_user);
}

#ifdef IKBO_WITH_CUDA
// a and b already oriented.
BmmParams make_params(const Tensor& a, const Tensor& b) {
  return {.num_users = static_cast<int32_t>(a.size(0)),
          .num_candidates = static_cast<int32_t>(b.size(0)),
          .p = static_cast<int32_t>(a.size(1)),
          .r = static_cast<int32_t>(a.size(2)),
          .n = static_cast<int32_t>(b.size(2)),
          .dtype = kernel_dtype(b.scalar_type()),
          .a_user = a.const_data_ptr(),
          .b_cand = b.const_data_ptr(),
          .stride_a_u = a.stride(0),
          .stride_a_p = a.stride(1),
          .stride_a_r = a.stride(2),
          .stride_b_b = b.stride(0),
          .stride_b_r = b.stride(1),
          .stride_b_n = b.stride(2)};
}

bool has_32_bit_sizes(const Tensor& t) {
  const auto sizes = t.sizes();
  return std::all_of(sizes.begin(), sizes.end(),
                     [](int64_t size) { return size <= std::numeric_limits<int32_t>::max(); });
}

// Index values are not read on the host: no synchronisation (ikbo/bmm_cuda.h says what an index out
// of range does).
Tensor bmm_cuda(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user,
                bool transpose_a, bool transpose_b) {
  check_bmm(a_user, b_cand, cand_to_user);
  const Tensor a = oriented(a_user, transpose_a);
  const Tensor b = oriented(b_cand, transpose_b);
  check_bmm_shapes(a, b, cand_to_user);
  if (!has_32_bit_sizes(a) || !has_32_bit_sizes(b)) return composite::bmm(a, b, cand_to_user);
  const int32_t device = b.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  BmmParams params = make_params(a, b);
  const Tensor out = torch::stable::new_empty(b, {b.size(0), a.size(1), b.size(2)});
  params.out = out.mutable_data_ptr();
  const DeviceLimits limits = query_device_limits(device);
  const BmmCudaConfig config = select_bmm_cuda_config(params, limits);
  if (config.kernel == BmmKernel::kNone) return composite::bmm(a, b, cand_to_user);
  if (out.numel() == 0) return out;
  const Tensor index = torch::stable::contiguous(cand_to_user);
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  const Tensor workspace = torch::stable::new_empty(
      b, {static_cast<int64_t>(bmm_workspace_bytes(params, config))}, ScalarType::Byte);
  trace_kernel("bmm", config);
  bmm(params, config, limits, workspace.mutable_data_ptr(), current_cuda_stream(device));
  return out;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "bmm(Tensor a_user, Tensor b_cand, Tensor cand_to_user, bool transpose_a=False, "
      "bool transpose_b=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("bmm", TORCH_BOX(&bmm_cpu)); }

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) { m.impl("bmm", TORCH_BOX(&bmm_cuda)); }
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("bmm", TORCH_BOX(&bmm_composite));
}

}  // namespace ikbo::ops
