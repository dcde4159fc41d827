// SPDX-License-Identifier: Apache-2.0
// ikbo::lce: schema, checks, registration.
#include <torch/csrc/stable/library.h>

#include "cpu/lce_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "common/kernel_trace.h"
#include "ikbo/lce.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

struct LceArgs {
  const Tensor& e_user;
  const Tensor& e_cand;
  const Tensor& w_user;
  const Tensor& w_cand;
  const std::optional<Tensor>& bias;
  const Tensor& cand_to_user;
};

void check_lce(const LceArgs& args) {
  constexpr const char* kOp = "lce";
  const Named e_user{"e_user", args.e_user};
  const Named e_cand{"e_cand", args.e_cand};
  const Named w_user{"w_user", args.w_user};
  const Named w_cand{"w_cand", args.w_cand};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  const Named bias{"bias", args.bias.has_value() ? *args.bias : args.e_user};
  check_devices(kOp, {e_user, e_cand, w_user, w_cand, bias, cand_to_user});
  check_float_dtypes(kOp, {e_user, e_cand, w_user, w_cand, bias});
  check_dtype(kOp, cand_to_user, ScalarType::Int);
  check_rank(kOp, e_user, 3, "[U, K_user, N]");
  check_rank(kOp, e_cand, 3, "[B, K_cand, N]");
  check_rank(kOp, w_user, 2, "[M, K_user]");
  check_rank(kOp, w_cand, 2, "[M, K_cand]");
  check_rank(kOp, cand_to_user, 1, "[B]");
  const Dim m{"M", args.w_cand.size(0)};
  const Dim n{"N", args.e_cand.size(2)};
  check_shape(kOp, e_user, {{"U", args.e_user.size(0)}, {"K_user", args.e_user.size(1)}, n});
  check_shape(kOp, w_user, {m, {"K_user", args.e_user.size(1)}});
  check_shape(kOp, w_cand, {m, {"K_cand", args.e_cand.size(1)}});
  check_shape(kOp, cand_to_user, {{"B", args.e_cand.size(0)}});
  if (args.bias.has_value()) {
    check_rank(kOp, bias, 1, "[M]");
    check_shape(kOp, bias, {m});
  }
}

Tensor lce_cpu(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user,
               const Tensor& w_cand, const std::optional<Tensor>& bias,
               const Tensor& cand_to_user) {
  check_lce({e_user, e_cand, w_user, w_cand, bias, cand_to_user});
  return cpu::lce(e_user, e_cand, w_user, w_cand, bias, cand_to_user);
}

Tensor lce_composite(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user,
                     const Tensor& w_cand, const std::optional<Tensor>& bias,
                     const Tensor& cand_to_user) {
  check_lce({e_user, e_cand, w_user, w_cand, bias, cand_to_user});
  return composite::lce(e_user, e_cand, w_user, w_cand, bias, cand_to_user);
}

#ifdef IKBO_WITH_CUDA
DType kernel_dtype(ScalarType dtype) {
  if (dtype == ScalarType::Half) return DType::kFloat16;
  return dtype == ScalarType::BFloat16 ? DType::kBFloat16 : DType::kFloat32;
}

LceParams make_params(const LceArgs& args, const Tensor& out) {
  return {.num_users = static_cast<int32_t>(args.e_user.size(0)),
          .num_candidates = static_cast<int32_t>(args.e_cand.size(0)),
          .m = static_cast<int32_t>(args.w_cand.size(0)),
          .n = static_cast<int32_t>(args.e_cand.size(2)),
          .k_user = static_cast<int32_t>(args.e_user.size(1)),
          .k_cand = static_cast<int32_t>(args.e_cand.size(1)),
          .dtype = kernel_dtype(args.e_cand.scalar_type()),
          .e_user = args.e_user.const_data_ptr(),
          .e_cand = args.e_cand.const_data_ptr(),
          .w_user = args.w_user.const_data_ptr(),
          .w_cand = args.w_cand.const_data_ptr(),
          .cand_to_user = static_cast<const int32_t*>(args.cand_to_user.const_data_ptr()),
          .out = out.mutable_data_ptr(),
          .stride_e_user_u = args.e_user.stride(0),
          .stride_e_user_k = args.e_user.stride(1),
          .stride_e_user_n = args.e_user.stride(2),
          .stride_e_cand_b = args.e_cand.stride(0),
          .stride_e_cand_k = args.e_cand.stride(1),
          .stride_e_cand_n = args.e_cand.stride(2),
          .stride_w_user_m = args.w_user.stride(0),
          .stride_w_user_k = args.w_user.stride(1),
          .stride_w_cand_m = args.w_cand.stride(0),
          .stride_w_cand_k = args.w_cand.stride(1)};
}

// Index values are not read on the host: no synchronisation (ikbo/lce.h says what an index out of
// range does).
Tensor lce_cuda(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user,
                const Tensor& w_cand, const std::optional<Tensor>& bias,
                const Tensor& cand_to_user) {
  const LceArgs args{e_user, e_cand, w_user, w_cand, bias, cand_to_user};
  check_lce(args);
  if (e_cand.scalar_type() == ScalarType::Double) {
    return composite::lce(e_user, e_cand, w_user, w_cand, bias, cand_to_user);
  }
  const int32_t device = e_cand.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = torch::stable::new_empty(e_cand, {e_cand.size(0), w_cand.size(0), e_cand.size(2)});
  LceParams params = make_params(args, out);
  const Tensor index = torch::stable::contiguous(cand_to_user);
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  std::optional<Tensor> dense_bias;
  if (bias.has_value()) {
    dense_bias = torch::stable::contiguous(*bias);
    params.bias = dense_bias->const_data_ptr();
  }
  const DeviceLimits limits = query_device_limits(device);
  const LceConfig config = select_lce_config(params, limits);
  const Tensor workspace = torch::stable::new_empty(
      e_cand, {static_cast<int64_t>(lce_workspace_bytes(params, config))}, ScalarType::Byte);
  params.workspace = workspace.mutable_data_ptr();
  trace_kernel("lce", config);
  lce(params, config, limits, current_cuda_stream(device));
  return out;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "lce(Tensor e_user, Tensor e_cand, Tensor w_user, Tensor w_cand, Tensor? bias, "
      "Tensor cand_to_user) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { m.impl("lce", TORCH_BOX(&lce_cpu)); }

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) { m.impl("lce", TORCH_BOX(&lce_cuda)); }
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("lce", TORCH_BOX(&lce_composite));
}

}  // namespace ikbo::ops
