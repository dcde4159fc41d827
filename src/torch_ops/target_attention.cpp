// SPDX-License-Identifier: Apache-2.0
// ikbo::target_attention and its backward: schemas, CPU and CUDA kernels, registration.
#include "ikbo/target_attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <tuple>

#include "common/kernel_trace.h"
#include "cpu/user_rows.h"
#include "torch_ops/attention_args.h"
#include "torch_ops/composite_attention.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include "ikbo/target_attention_cuda.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

constexpr const char* kOp = "target_attention";

// Rows are counted in int32, by the kernel and by its plan.
void check_sizes(const AttentionArgs& args) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t rows = args.q.size(0) * args.q.size(1) * args.q.size(2);
  STD_TORCH_CHECK(rows <= kMax, "ikbo::target_attention: B * Q * H must be at most ", kMax,
                  "; got ", rows, "; split the candidates over several calls");
  for (int64_t size : {args.k.size(0), args.k.size(1), args.q.size(3)}) {
    STD_TORCH_CHECK(size <= kMax, "ikbo::target_attention: U, S and D must be at most ", kMax,
                    "; got ", size);
  }
}

Tensor checked_lengths(const char* name, const Tensor& lengths, int64_t num_keys) {
  const Tensor values = torch::stable::contiguous(lengths);
  const int32_t* data = values.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    STD_TORCH_CHECK(data[i] >= 0 && data[i] <= num_keys, "ikbo::target_attention: ", name,
                    " values must be in [0, S] with S = ", num_keys, "; got ", name, "[", i,
                    "] = ", data[i]);
  }
  return values;
}

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

std::array<int64_t, 4> strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

// Sizes, q, k and v of checked arguments.
TargetAttentionParams make_params(const AttentionArgs& args) {
  TargetAttentionParams params;
  params.num_users = static_cast<int32_t>(args.k.size(0));
  params.num_candidates = static_cast<int32_t>(args.q.size(0));
  params.num_queries = static_cast<int32_t>(args.q.size(1));
  params.num_keys = static_cast<int32_t>(args.k.size(1));
  params.num_heads = static_cast<int32_t>(args.q.size(2));
  params.num_kv_heads = static_cast<int32_t>(args.k.size(2));
  params.head_dim = static_cast<int32_t>(args.q.size(3));
  params.dtype = dtype_of(args.q);
  params.scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(args.q.size(3))));
  params.q = args.q.const_data_ptr();
  params.k = args.k.const_data_ptr();
  params.v = args.v.const_data_ptr();
  params.stride_q = strides_of(args.q);
  params.stride_k = strides_of(args.k);
  params.stride_v = strides_of(args.v);
  return params;
}

bool is_empty(const TargetAttentionParams& params) {
  return params.num_candidates == 0 || params.num_queries == 0 || params.num_heads == 0;
}

// The params of a call, and the contiguous copies that they point to.
struct AttentionCall {
  explicit AttentionCall(const AttentionArgs& args) {
    check_attention(args);
    check_sizes(args);
    const int64_t num_keys = args.k.size(1);
    index = cpu::checked_index(kOp, args.cand_to_user, args.k.size(0));
    params = make_params(args);
    params.cand_to_user = index.const_data_ptr<int32_t>();
    if (args.user_lengths) {
      user_lengths = checked_lengths("user_lengths", *args.user_lengths, num_keys);
      params.user_lengths = user_lengths->const_data_ptr<int32_t>();
    }
    if (args.cand_lengths) {
      cand_lengths = checked_lengths("cand_lengths", *args.cand_lengths, num_keys);
      params.cand_lengths = cand_lengths->const_data_ptr<int32_t>();
    }
    if (args.user_mask) {
      user_mask = torch::stable::contiguous(*args.user_mask);
      params.user_mask = user_mask->const_data_ptr<bool>();
    }
  }

  TargetAttentionParams params;
  Tensor index;
  std::optional<Tensor> user_lengths;
  std::optional<Tensor> cand_lengths;
  std::optional<Tensor> user_mask;
};

// Runs `work(next_task)` on every thread; tasks are handed out through the counter.
template <typename Work>
void run_on_threads(const TargetAttentionPlan& plan, const Work& work) {
  const auto num_tasks = static_cast<int64_t>(plan.tasks().size());
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), num_tasks);
  std::atomic<int64_t> next_task{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) { work(next_task); });
}

ScalarType lse_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

std::tuple<Tensor, Tensor> target_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& cand_to_user,
                                                const std::optional<Tensor>& user_lengths,
                                                const std::optional<Tensor>& cand_lengths,
                                                const std::optional<Tensor>& user_mask,
                                                const std::optional<double>& scale) {
  AttentionCall call({q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale});
  Tensor out = torch::stable::new_empty(q, q.sizes());
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, lse_dtype(q));
  const TargetAttentionConfig config = select_target_attention_config(call.params);
  trace_kernel(kOp, config);
  if (!is_empty(call.params)) {
    call.params.out = out.mutable_data_ptr();
    call.params.lse = lse.mutable_data_ptr();
    const TargetAttentionPlan plan(call.params, config);
    const CpuIsa isa = native_cpu_isa();
    run_on_threads(
        plan, [&](auto& next_task) { run_target_attention(call.params, plan, isa, next_task); });
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> target_attention_backward_cpu(
    const Tensor& grad_out, const Tensor& grad_lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& cand_to_user, const std::optional<Tensor>& user_lengths,
    const std::optional<Tensor>& cand_lengths, const std::optional<Tensor>& user_mask,
    const std::optional<double>& scale, const Tensor& out, const Tensor& lse) {
  AttentionCall call({q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale});
  const Tensor out_grads = torch::stable::contiguous(grad_out);
  const Tensor lse_grads = torch::stable::contiguous(grad_lse);
  Tensor grad_q = torch::stable::new_zeros(q, q.sizes());
  Tensor grad_k = torch::stable::new_zeros(k, k.sizes());
  Tensor grad_v = torch::stable::new_zeros(v, v.sizes());
  if (!is_empty(call.params)) {
    // The kernel reads the forward pass' results through the same pointers that it writes there.
    call.params.out = const_cast<void*>(out.const_data_ptr());
    call.params.lse = const_cast<void*>(lse.const_data_ptr());
    const TargetAttentionGradParams params{
        .forward = call.params,
        .grad_out = out_grads.const_data_ptr(),
        .grad_lse = lse_grads.const_data_ptr(),
        .grad_q = grad_q.mutable_data_ptr(),
        .grad_k = grad_k.mutable_data_ptr(),
        .grad_v = grad_v.mutable_data_ptr(),
    };
    const TargetAttentionPlan plan =
        TargetAttentionPlan::for_backward(call.params, select_target_attention_config(call.params));
    const CpuIsa isa = native_cpu_isa();
    run_on_threads(plan, [&](auto& next_task) {
      run_target_attention_backward(params, plan, isa, next_task);
    });
  }
  return {grad_q, grad_k, grad_v};
}

#ifdef IKBO_WITH_CUDA
// The values of a list that the device reads, contiguous; nullptr where there is none.
const int32_t* int32_data(const std::optional<Tensor>& list, std::optional<Tensor>& dense) {
  if (!list) return nullptr;
  dense = torch::stable::contiguous(*list);
  return static_cast<const int32_t*>(dense->const_data_ptr());
}

// Index values and lengths are not read on the host: no synchronisation
// (ikbo/target_attention_cuda.h says what values out of range do).
std::tuple<Tensor, Tensor> target_attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& cand_to_user,
                                                 const std::optional<Tensor>& user_lengths,
                                                 const std::optional<Tensor>& cand_lengths,
                                                 const std::optional<Tensor>& user_mask,
                                                 const std::optional<double>& scale) {
  const AttentionArgs args{q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale};
  check_attention(args);
  check_sizes(args);
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  TargetAttentionParams params = make_params(args);
  if (user_mask) params.user_mask = static_cast<const bool*>(user_mask->const_data_ptr());
  const DeviceLimits limits = query_device_limits(device);
  const TargetAttentionCudaConfig config = select_target_attention_cuda_config(params, limits);
  if (config.kernel == TargetAttentionKernel::kNone) return composite::target_attention(args);

  const Tensor out = torch::stable::new_empty(q, q.sizes());
  const Tensor lse =
      torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
  if (is_empty(params)) return {out, lse};
  const Tensor index = torch::stable::contiguous(cand_to_user);
  std::optional<Tensor> dense_user_lengths;
  std::optional<Tensor> dense_cand_lengths;
  params.cand_to_user = static_cast<const int32_t*>(index.const_data_ptr());
  params.user_lengths = int32_data(user_lengths, dense_user_lengths);
  params.cand_lengths = int32_data(cand_lengths, dense_cand_lengths);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  const Tensor workspace = torch::stable::new_empty(
      q, {static_cast<int64_t>(target_attention_workspace_bytes(params, config))},
      ScalarType::Byte);
  trace_kernel(kOp, config);
  target_attention(params, config, limits, workspace.mutable_data_ptr(),
                   current_cuda_stream(device));
  return {out, lse};
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def(
      "target_attention(Tensor q, Tensor k, Tensor v, Tensor cand_to_user, "
      "Tensor? user_lengths=None, Tensor? cand_lengths=None, Tensor? user_mask=None, "
      "float? scale=None) -> (Tensor out, Tensor lse)");
  m.def(
      "_target_attention_backward(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, "
      "Tensor v, Tensor cand_to_user, Tensor? user_lengths, Tensor? cand_lengths, "
      "Tensor? user_mask, float? scale, Tensor out, Tensor lse) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) {
  m.impl("target_attention", TORCH_BOX(&target_attention_cpu));
  m.impl("_target_attention_backward", TORCH_BOX(&target_attention_backward_cpu));
}

#ifdef IKBO_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) {
  m.impl("target_attention", TORCH_BOX(&target_attention_cuda));
}
#endif

}  // namespace ikbo::ops
