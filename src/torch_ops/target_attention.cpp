// SPDX-License-Identifier: Apache-2.0
// ikbo::target_attention, target_attention.packed and their backward: schemas, implementations by
// device, registration.
#include "ikbo/target_attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "torch_ops/attention_args.h"
#include "torch_ops/attention_cpu.h"
#include "torch_ops/composite_attention.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include "common/kernel_trace.h"
#include "ikbo/target_attention_cuda.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

#ifdef IKBO_WITH_CUDA
// The values of a tensor that the device reads, contiguous; nullptr where there is none.
template <typename T>
const T* data_of(const std::optional<Tensor>& tensor, std::optional<Tensor>& dense) {
  if (!tensor) return nullptr;
  dense = torch::stable::contiguous(*tensor);
  return static_cast<const T*>(dense->const_data_ptr());
}

// Index values and lengths are not read on the host: no synchronisation
// (ikbo/target_attention_cuda.h says what values out of range do).
std::tuple<Tensor, Tensor> run_cuda(const AttentionArgs& args) {
  check_sizes(args);
  const Tensor& q = args.q;
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  TargetAttentionParams params = make_params(args);
  std::optional<Tensor> dense_user_mask;
  std::optional<Tensor> dense_user_offsets;
  params.user_mask = data_of<bool>(args.user_mask, dense_user_mask);
  params.user_offsets = data_of<int32_t>(args.user_offsets, dense_user_offsets);
  if (args.is_packed()) params.num_keys = static_cast<int32_t>(args.k.size(0));
  const DeviceLimits limits = query_device_limits(device);
  const TargetAttentionCudaConfig config = select_target_attention_cuda_config(params, limits);
  if (config.kernel == TargetAttentionKernel::kNone) return composite::target_attention(args);

  const Tensor out = torch::stable::new_empty(q, q.sizes());
  const Tensor lse =
      torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  if (is_empty(params)) return {out, lse};
  const Tensor index = torch::stable::contiguous(args.cand_to_user);
  std::optional<Tensor> dense_user_lengths;
  std::optional<Tensor> dense_cand_lengths;
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  params.user_lengths = data_of<int32_t>(args.user_lengths, dense_user_lengths);
  params.cand_lengths = data_of<int32_t>(args.cand_lengths, dense_cand_lengths);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  const Tensor workspace = torch::stable::new_empty(
      q, {static_cast<int64_t>(target_attention_workspace_bytes(params, config))},
      ScalarType::Byte);
  trace_kernel(args.op, config);
  target_attention(params, config, limits, workspace.mutable_data_ptr(),
                   current_cuda_stream(device));
  return {out, lse};
}
#endif

// One entry per schema, for the implementation of each device.
using Forward = std::tuple<Tensor, Tensor> (*)(const AttentionArgs&);
using Backward = std::tuple<Tensor, Tensor, Tensor> (*)(const AttentionArgs&, const AttentionGrads&,
                                                        const Tensor&, const Tensor&);

template <Forward run>
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& cand_to_user,
                                   const std::optional<Tensor>& user_lengths,
                                   const std::optional<Tensor>& cand_lengths,
                                   const std::optional<Tensor>& user_mask,
                                   const std::optional<double>& scale) {
  const AttentionArgs args{q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale};
  check_attention(args);
  return run(args);
}

template <Backward run>
std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const Tensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& cand_to_user, const std::optional<Tensor>& user_lengths,
    const std::optional<Tensor>& cand_lengths, const std::optional<Tensor>& user_mask,
    const std::optional<double>& scale, const Tensor& out, const Tensor& lse) {
  const AttentionArgs args{q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale};
  check_attention(args);
  return run(args, {grad_out, grad_lse}, out, lse);
}

template <Forward run>
std::tuple<Tensor, Tensor> packed_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const Tensor& cand_to_user, const Tensor& user_offsets,
                                          const std::optional<Tensor>& cand_lengths,
                                          const std::optional<double>& scale) {
  const std::optional<Tensor> offsets = user_offsets;
  const AttentionArgs args{q,         k,     v,      cand_to_user, kNoTensor, cand_lengths,
                           kNoTensor, scale, offsets};
  check_attention(args);
  return run(args);
}

template <Backward run>
std::tuple<Tensor, Tensor, Tensor> packed_backward(const Tensor& grad_out, const Tensor& grad_lse,
                                                   const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& cand_to_user,
                                                   const Tensor& user_offsets,
                                                   const std::optional<Tensor>& cand_lengths,
                                                   const std::optional<double>& scale,
                                                   const Tensor& out, const Tensor& lse) {
  const std::optional<Tensor> offsets = user_offsets;
  const AttentionArgs args{q,         k,     v,      cand_to_user, kNoTensor, cand_lengths,
                           kNoTensor, scale, offsets};
  check_attention(args);
  return run(args, {grad_out, grad_lse}, out, lse);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "target_attention(Tensor q, Tensor k, Tensor v, Tensor cand_to_user, "
      "Tensor? user_lengths=None, Tensor? cand_lengths=None, Tensor? user_mask=None, "
      "float? scale=None) -> (Tensor out, Tensor lse)");
  m.def(
      "target_attention.packed(Tensor q, Tensor k, Tensor v, Tensor cand_to_user, "
      "Tensor user_offsets, Tensor? cand_lengths=None, float? scale=None) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "_target_attention_backward(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, "
      "Tensor v, Tensor cand_to_user, Tensor? user_lengths, Tensor? cand_lengths, "
      "Tensor? user_mask, float? scale, Tensor out, Tensor lse) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
  m.def(
      "_target_attention_backward.packed(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, "
      "Tensor v, Tensor cand_to_user, Tensor user_offsets, Tensor? cand_lengths, float? scale, "
      "Tensor out, Tensor lse) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("target_attention", TORCH_BOX(&forward<&run_attention_cpu>));
  m.impl("target_attention.packed", TORCH_BOX(&packed_forward<&run_attention_cpu>));
  m.impl("_target_attention_backward", TORCH_BOX(&backward<&run_attention_backward_cpu>));
  m.impl("_target_attention_backward.packed",
         TORCH_BOX(&packed_backward<&run_attention_backward_cpu>));
}

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("target_attention", TORCH_BOX(&forward<&run_cuda>));
  m.impl("target_attention.packed", TORCH_BOX(&packed_forward<&run_cuda>));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("target_attention", TORCH_BOX(&forward<&composite::target_attention>));
  m.impl("target_attention.packed", TORCH_BOX(&packed_forward<&composite::target_attention>));
  m.impl("_target_attention_backward", TORCH_BOX(&backward<&composite::target_attention_backward>));
  m.impl("_target_attention_backward.packed",
         TORCH_BOX(&packed_backward<&composite::target_attention_backward>));
}

}  // namespace ikbo::ops
