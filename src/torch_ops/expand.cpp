// SPDX-License-Identifier: Apache-2.0
// ikbo::expand: schema, checks, registration.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cpu/expand_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "common/kernel_trace.h"
#include "ikbo/expand.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

void check_expand(const Tensor& x_user, const Tensor& cand_to_user) {
  constexpr const char* kOp = "expand";
  check_devices(kOp, {{"x_user", x_user}, {"cand_to_user", cand_to_user}});
  check_dtype(kOp, {"cand_to_user", cand_to_user}, ScalarType::Int);
  STD_TORCH_CHECK(x_user.dim() >= 1, "ikbo::expand: x_user must have rank 1 or more, [U, ...]; ",
                  "got rank 0");
  check_rank(kOp, {"cand_to_user", cand_to_user}, 1, "[B]");
}

Tensor expand_cpu(const Tensor& x_user, const Tensor& cand_to_user) {
  check_expand(x_user, cand_to_user);
  return cpu::expand(x_user, cand_to_user);
}

Tensor expand_composite(const Tensor& x_user, const Tensor& cand_to_user) {
  check_expand(x_user, cand_to_user);
  return composite::expand(x_user, cand_to_user);
}

#ifdef IKBO_WITH_CUDA
// Whether each user's row is contiguous, whatever stands between the users' rows.
bool has_contiguous_rows(const Tensor& x_user) {
  int64_t expected = 1;
  for (int64_t d = x_user.dim() - 1; d > 0; --d) {
    if (x_user.size(d) != 1 && x_user.stride(d) != expected) {
      return false;
    }
    expected *= x_user.size(d);
  }
  return true;
}

// Index values are not read on the host: no synchronisation (ikbo/expand.h says what an index out
// of range does).
Tensor expand_cuda(const Tensor& x_user, const Tensor& cand_to_user) {
  check_expand(x_user, cand_to_user);
  const int32_t device = x_user.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor index = torch::stable::contiguous(cand_to_user);
  // Rows with strides are copied at U, which is small beside B.
  const Tensor rows = has_contiguous_rows(x_user) ? x_user : torch::stable::contiguous(x_user);
  const auto user_sizes = x_user.sizes();
  std::vector<int64_t> sizes(user_sizes.begin(), user_sizes.end());
  sizes[0] = index.numel();
  Tensor out = torch::stable::new_empty(x_user, sizes);
  if (out.numel() == 0) {
    return out;
  }
  const auto element_size = static_cast<int64_t>(x_user.element_size());
  const ExpandParams params{.num_users = static_cast<int32_t>(x_user.size(0)),
                            .num_candidates = static_cast<int32_t>(index.numel()),
                            .row_bytes = out.numel() / index.numel() * element_size,
                            .user_stride = rows.stride(0) * element_size,
                            .x_user = rows.const_data_ptr(),
                            .cand_to_user = static_cast<const int32_t*>(index.const_data_ptr()),
                            .out = out.mutable_data_ptr()};
  const ExpandConfig config = select_expand_config(params);
  trace_kernel("expand", config);
  expand(params, config, current_cuda_stream(device));
  return out;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def("expand(Tensor x_user, Tensor cand_to_user) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("expand", TORCH_BOX(&expand_cpu)); }

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) { m.impl("expand", TORCH_BOX(&expand_cuda)); }
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("expand", TORCH_BOX(&expand_composite));
}

}  // namespace ikbo::ops
