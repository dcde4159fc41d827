// SPDX-License-Identifier: Apache-2.0
// ikbo::linear and linear.prepacked: schemas, checks, registration.
#include <torch/csrc/stable/library.h>

#include "cpu/linear_cpu.h"
#include "torch_ops/checks.h"
#include "torch_ops/composite.h"
#include "torch_ops/packed_weight.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "common/kernel_trace.h"
#include "ikbo/linear.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

constexpr const char* kOp = "linear";

struct LinearArgs {
  const Tensor& x_user;
  const Tensor& x_cand;
  const Tensor& w_user;
  const Tensor& w_cand;
  const std::optional<Tensor>& bias;
  const Tensor& cand_to_user;
};

enum class Weight { kPlain, kPacked };

void check_linear(const LinearArgs& args, Weight form) {
  const bool is_packed = form == Weight::kPacked;
  const Named x_user{"x_user", args.x_user};
  const Named x_cand{"x_cand", args.x_cand};
  const Named w_user{"w_user", args.w_user};
  const Named w_cand{is_packed ? "w_cand_packed" : "w_cand", args.w_cand};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  const Named bias{"bias", args.bias.has_value() ? *args.bias : args.x_user};
  check_devices(kOp, {x_user, x_cand, w_user, w_cand, bias, cand_to_user});
  check_float_dtypes(kOp, {x_user, x_cand, w_user, is_packed ? w_user : w_cand, bias});
  check_dtype(kOp, cand_to_user, ScalarType::Int);
  check_rank(kOp, x_user, 2, "[U, K_user]");
  check_rank(kOp, x_cand, 2, "[B, K_cand]");
  check_rank(kOp, w_user, 2, "[M, K_user]");
  if (!is_packed) {
    check_rank(kOp, w_cand, 2, "[M, K_cand]");
  }
  check_rank(kOp, cand_to_user, 1, "[B]");
  const Dim m{"M", (is_packed ? args.w_user : args.w_cand).size(0)};
  check_shape(kOp, w_user, {m, {"K_user", args.x_user.size(1)}});
  if (!is_packed) {
    check_shape(kOp, w_cand, {m, {"K_cand", args.x_cand.size(1)}});
  }
  check_shape(kOp, cand_to_user, {{"B", args.x_cand.size(0)}});
  if (args.bias.has_value()) {
    check_rank(kOp, bias, 1, "[M]");
    check_shape(kOp, bias, {m});
  }
}

Tensor run_cpu(const LinearArgs& args, Activation activation) {
  return cpu::linear(args.x_user, args.x_cand, args.w_user, args.w_cand, args.bias,
                     args.cand_to_user, activation);
}

Tensor run_composite(const LinearArgs& args, Activation activation) {
  return composite::linear(args.x_user, args.x_cand, args.w_user, args.w_cand, args.bias,
                           args.cand_to_user, activation);
}

#ifdef IKBO_WITH_CUDA
LinearParams make_params(const LinearArgs& args, Activation activation, const Tensor& out) {
  return {.num_users = static_cast<int32_t>(args.x_user.size(0)),
          .num_candidates = static_cast<int32_t>(args.x_cand.size(0)),
          .m = static_cast<int32_t>(args.w_cand.size(0)),
          .k_user = static_cast<int32_t>(args.x_user.size(1)),
          .k_cand = static_cast<int32_t>(args.x_cand.size(1)),
          .dtype = kernel_dtype(args.x_cand.scalar_type()),
          .activation = activation,
          .x_user = args.x_user.const_data_ptr(),
          .x_cand = args.x_cand.const_data_ptr(),
          .w_user = args.w_user.const_data_ptr(),
          .w_cand = args.w_cand.const_data_ptr(),
          .out = out.mutable_data_ptr(),
          .stride_x_user_u = args.x_user.stride(0),
          .stride_x_user_k = args.x_user.stride(1),
          .stride_x_cand_b = args.x_cand.stride(0),
          .stride_x_cand_k = args.x_cand.stride(1),
          .stride_w_user_m = args.w_user.stride(0),
          .stride_w_user_k = args.w_user.stride(1),
          .stride_w_cand_m = args.w_cand.stride(0),
          .stride_w_cand_k = args.w_cand.stride(1)};
}

// Index values are not read on the host: no synchronisation (ikbo/linear.h says what an index out
// of range does).
Tensor run_cuda(const LinearArgs& args, Activation activation) {
  const Tensor& x_cand = args.x_cand;
  if (x_cand.scalar_type() == ScalarType::Double) {
    return run_composite(args, activation);
  }
  const int32_t device = x_cand.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = torch::stable::new_empty(x_cand, {x_cand.size(0), args.w_user.size(0)});
  LinearParams params = make_params(args, activation, out);
  const Tensor index = torch::stable::contiguous(args.cand_to_user);
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  std::optional<Tensor> dense_bias;
  if (args.bias.has_value()) {
    dense_bias = torch::stable::contiguous(*args.bias);
    params.bias = dense_bias->const_data_ptr();
  }
  const DeviceLimits limits = query_device_limits(device);
  const LinearConfig config = select_linear_config(params, limits);
  const Tensor workspace = torch::stable::new_empty(
      x_cand, {static_cast<int64_t>(linear_workspace_bytes(params, config))}, ScalarType::Byte);
  params.workspace = workspace.mutable_data_ptr();
  trace_kernel("linear", config);
  linear(params, config, limits, current_cuda_stream(device));
  return out;
}
#endif

// One entry per schema, for the implementation of each device.
using Run = Tensor (*)(const LinearArgs&, Activation);

template <Run run>
Tensor linear_plain(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
                    const Tensor& w_cand, const std::optional<Tensor>& bias,
                    const Tensor& cand_to_user, const std::string& activation) {
  const LinearArgs args{x_user, x_cand, w_user, w_cand, bias, cand_to_user};
  check_linear(args, Weight::kPlain);
  return run(args, checked_activation(kOp, activation));
}

template <Run run>
Tensor linear_prepacked(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
                        const Tensor& w_cand_packed, const std::optional<Tensor>& bias,
                        const Tensor& cand_to_user, const std::string& activation) {
  check_linear({x_user, x_cand, w_user, w_cand_packed, bias, cand_to_user}, Weight::kPacked);
  const PackedWeight weight = open_packed(
      kOp, w_cand_packed,
      packed_format(x_user.device(), x_user.scalar_type(), w_user.size(0), {x_cand.size(1)}));
  return run({x_user, x_cand, w_user, weight.matrix, bias, cand_to_user},
             checked_activation(kOp, activation));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "linear(Tensor x_user, Tensor x_cand, Tensor w_user, Tensor w_cand, Tensor? bias, "
      "Tensor cand_to_user, str activation=\"none\") -> Tensor");
  m.def(
      "linear.prepacked(Tensor x_user, Tensor x_cand, Tensor w_user, Tensor w_cand_packed, "
      "Tensor? bias, Tensor cand_to_user, str activation=\"none\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_plain<&run_cpu>));
  m.impl("linear.prepacked", TORCH_BOX(&linear_prepacked<&run_cpu>));
}

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear_plain<&run_cuda>));
  m.impl("linear.prepacked", TORCH_BOX(&linear_prepacked<&run_cuda>));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("linear", TORCH_BOX(&linear_plain<&run_composite>));
  m.impl("linear.prepacked", TORCH_BOX(&linear_prepacked<&run_composite>));
}

}  // namespace ikbo::ops
