// SPDX-License-Identifier: Apache-2.0
// ikbo::lce, lce.list and lce.prepacked: schemas, implementations by device, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/lce_cpu.h"
#include "torch_ops/composite.h"
#include "torch_ops/lce_args.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include "common/kernel_trace.h"
#include "ikbo/lce.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

Tensor run_cpu(const LceCall& call) {
  return cpu::lce(call.e_user, call.e_cand, call.w_user, call.w_cand.matrix, call.bias,
                  call.cand_to_user);
}

Tensor run_composite(const LceCall& call) {
  return composite::lce(call.e_user, call.e_cand, call.w_user, call.w_cand.matrix, call.bias,
                        call.cand_to_user);
}

#ifdef IKBO_WITH_CUDA
LceParams make_params(const LceCall& call, const std::vector<LcePart>& parts, const Tensor& out) {
  const LcePart& first = parts.front();
  const Tensor& w_cand = call.w_cand.matrix;
  LceParams params{.num_users = static_cast<int32_t>(call.e_user.size(0)),
                   .num_candidates = static_cast<int32_t>(call.e_cand.front().size(0)),
                   .m = static_cast<int32_t>(w_cand.size(0)),
                   .n = static_cast<int32_t>(call.e_user.size(2)),
                   .k_user = static_cast<int32_t>(call.e_user.size(1)),
                   .dtype = kernel_dtype(call.e_user.scalar_type()),
                   .e_user = call.e_user.const_data_ptr(),
                   .e_cand = first.e,
                   .w_user = call.w_user.const_data_ptr(),
                   .w_cand = w_cand.const_data_ptr(),
                   .out = out.mutable_data_ptr(),
                   .stride_e_user_u = call.e_user.stride(0),
                   .stride_e_user_k = call.e_user.stride(1),
                   .stride_e_user_n = call.e_user.stride(2),
                   .stride_e_cand_b = first.stride_b,
                   .stride_e_cand_k = first.stride_k,
                   .stride_e_cand_n = first.stride_n,
                   .stride_w_user_m = call.w_user.stride(0),
                   .stride_w_user_k = call.w_user.stride(1),
                   .stride_w_cand_m = w_cand.stride(0),
                   .stride_w_cand_k = w_cand.stride(1)};
  if (parts.size() > 1) {
    params.cand_parts = parts.data();
    params.num_cand_parts = static_cast<int32_t>(parts.size());
  }
  for (const LcePart& part : parts) {
    params.k_cand += part.k;
  }
  return params;
}

std::vector<LcePart> make_parts(const LceCall& call) {
  std::vector<LcePart> parts;
  for (const Tensor& e : call.e_cand) {
    parts.push_back({.e = e.const_data_ptr(),
                     .k = static_cast<int32_t>(e.size(1)),
                     .stride_b = e.stride(0),
                     .stride_k = e.stride(1),
                     .stride_n = e.stride(2)});
  }
  return parts;
}

// Index values are not read on the host: no synchronisation (ikbo/lce.h says what an index out of
// range does).
Tensor run_cuda(const LceCall& call) {
  const Tensor& e_user = call.e_user;
  if (e_user.scalar_type() == ScalarType::Double) {
    return run_composite(call);
  }
  const int32_t device = e_user.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor out = torch::stable::new_empty(
      e_user, {call.e_cand.front().size(0), call.w_user.size(0), e_user.size(2)});
  const std::vector<LcePart> parts = make_parts(call);
  LceParams params = make_params(call, parts, out);
  const Tensor index = torch::stable::contiguous(call.cand_to_user);
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  std::optional<Tensor> dense_bias;
  if (call.bias.has_value()) {
    dense_bias = torch::stable::contiguous(*call.bias);
    params.bias = dense_bias->const_data_ptr();
  }
  const DeviceLimits limits = query_device_limits(device);
  params.w_cand_packed = call.w_cand.image;
  const LceConfig config = select_lce_config(params, limits);
  // A kernel of other tiles, or of none, reads the matrix of a packed weight instead.
  if (config.kernel != LceKernel::kSm90 || config.tile_m != call.w_cand.tile_m) {
    params.w_cand_packed = nullptr;
  }
  if (parts.size() > 1 && config.kernel != LceKernel::kSm90) {
    return run_composite(call);
  }
  const Tensor workspace = torch::stable::new_empty(
      e_user, {static_cast<int64_t>(lce_workspace_bytes(params, config))}, ScalarType::Byte);
  params.workspace = workspace.mutable_data_ptr();
  trace_kernel("lce", config);
  lce(params, config, limits, current_cuda_stream(device));
  return out;
}
#endif

// One entry per schema, for the implementation of each device.
using Run = Tensor (*)(const LceCall&);

template <Run run>
Tensor lce_one(const Tensor& e_user, const Tensor& e_cand, const Tensor& w_user,
               const Tensor& w_cand, const std::optional<Tensor>& bias,
               const Tensor& cand_to_user) {
  const std::vector<Tensor> parts{e_cand};
  return run(checked_lce({LceForm::kOne, e_user, parts, w_user, w_cand, bias, cand_to_user}));
}

template <Run run>
Tensor lce_list(const Tensor& e_user, const std::vector<Tensor>& e_cand, const Tensor& w_user,
                const Tensor& w_cand, const std::optional<Tensor>& bias,
                const Tensor& cand_to_user) {
  return run(checked_lce({LceForm::kList, e_user, e_cand, w_user, w_cand, bias, cand_to_user}));
}

template <Run run>
Tensor lce_prepacked(const Tensor& e_user, const std::vector<Tensor>& e_cand, const Tensor& w_user,
                     const Tensor& w_cand_packed, const std::optional<Tensor>& bias,
                     const Tensor& cand_to_user) {
  return run(checked_lce(
      {LceForm::kPrepacked, e_user, e_cand, w_user, w_cand_packed, bias, cand_to_user}));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "lce(Tensor e_user, Tensor e_cand, Tensor w_user, Tensor w_cand, Tensor? bias, "
      "Tensor cand_to_user) -> Tensor");
  m.def(
      "lce.list(Tensor e_user, Tensor[] e_cand, Tensor w_user, Tensor w_cand, Tensor? bias, "
      "Tensor cand_to_user) -> Tensor");
  m.def(
      "lce.prepacked(Tensor e_user, Tensor[] e_cand, Tensor w_user, Tensor w_cand_packed, "
      "Tensor? bias, Tensor cand_to_user) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("lce", TORCH_BOX(&lce_one<&run_cpu>));
  m.impl("lce.list", TORCH_BOX(&lce_list<&run_cpu>));
  m.impl("lce.prepacked", TORCH_BOX(&lce_prepacked<&run_cpu>));
}

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("lce", TORCH_BOX(&lce_one<&run_cuda>));
  m.impl("lce.list", TORCH_BOX(&lce_list<&run_cuda>));
  m.impl("lce.prepacked", TORCH_BOX(&lce_prepacked<&run_cuda>));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("lce", TORCH_BOX(&lce_one<&run_composite>));
  m.impl("lce.list", TORCH_BOX(&lce_list<&run_composite>));
  m.impl("lce.prepacked", TORCH_BOX(&lce_prepacked<&run_composite>));
}

}  // namespace ikbo::ops
