// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/attention_cpu.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#include "common/kernel_trace.h"
#include "cpu/user_rows.h"

namespace ikbo::ops {
namespace {

// Values in [0, S]; of packed histories, which have no S, not negative.
Tensor checked_lengths(const char* name, const Tensor& lengths, const AttentionArgs& args) {
  const Tensor values = torch::stable::contiguous(lengths);
  const int32_t* data = values.const_data_ptr<int32_t>();
  const int64_t longest = args.is_packed() ? std::numeric_limits<int32_t>::max() : args.k.size(1);
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (data[i] >= 0 && data[i] <= longest) {
      continue;
    }
    STD_TORCH_CHECK(!args.is_packed(), "ikbo::", args.op, ": ", name,
                    " values must not be negative; got ", name, "[", i, "] = ", data[i]);
    STD_TORCH_CHECK(false, "ikbo::", args.op, ": ", name,
                    " values must be in [0, S] with S = ", longest, "; got ", name, "[", i,
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

// Of the last four dimensions; 0 for the first where there are three.
std::array<int64_t, 4> strides_of(const Tensor& tensor) {
  std::array<int64_t, 4> strides{};
  std::copy(tensor.strides().begin(), tensor.strides().end(), strides.end() - tensor.dim());
  return strides;
}

// The params of a call, and the contiguous copies that they point to.
struct AttentionCall {
  explicit AttentionCall(const AttentionArgs& args) {
    check_sizes(args);
    index = cpu::checked_index(args.op, args.cand_to_user, args.num_users());
    params = make_params(args);
    params.cand_to_user = index.const_data_ptr<int32_t>();
    if (args.user_offsets) {
      user_offsets = torch::stable::contiguous(*args.user_offsets);
      params.num_keys =
          static_cast<int32_t>(checked_longest_history(*user_offsets, args.k.size(0)));
      params.user_offsets = user_offsets->const_data_ptr<int32_t>();
    }
    if (args.user_lengths) {
      user_lengths = checked_lengths("user_lengths", *args.user_lengths, args);
      params.user_lengths = user_lengths->const_data_ptr<int32_t>();
    }
    if (args.cand_lengths) {
      cand_lengths = checked_lengths("cand_lengths", *args.cand_lengths, args);
      params.cand_lengths = cand_lengths->const_data_ptr<int32_t>();
    }
    if (args.user_mask) {
      user_mask = torch::stable::contiguous(*args.user_mask);
      params.user_mask = user_mask->const_data_ptr<bool>();
    }
  }

  TargetAttentionParams params;
  Tensor index;
  std::optional<Tensor> user_offsets;
  std::optional<Tensor> user_lengths;
  std::optional<Tensor> cand_lengths;
  std::optional<Tensor> user_mask;
};

// A call with room for its results.
struct AttentionRun : AttentionCall {
  explicit AttentionRun(const AttentionArgs& args)
      : AttentionCall(args),
        out(torch::stable::new_empty(args.q, args.q.sizes())),
        lse(torch::stable::new_empty(args.q, {args.q.size(0), args.q.size(2), args.q.size(1)},
                                     lse_dtype(args.q))) {
    params.out = out.mutable_data_ptr();
    params.lse = lse.mutable_data_ptr();
  }

  Tensor out;
  Tensor lse;
};

// Runs `work()` on every thread, as far as there are tasks.
template <typename Work>
void run_on_threads(std::size_t num_tasks, const Work& work) {
  const int64_t workers =
      std::min<int64_t>(torch::stable::get_num_threads(), static_cast<int64_t>(num_tasks));
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) { work(); });
}

}  // namespace

void check_sizes(const AttentionArgs& args) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const int64_t rows = args.q.size(0) * args.q.size(1) * args.q.size(2);
  STD_TORCH_CHECK(rows <= kMax, "ikbo::", args.op, ": B * Q * H must be at most ", kMax, "; got ",
                  rows, "; split the candidates over several calls");
  const char* letter = args.is_packed() ? "T" : "S";
  const int64_t num_rows = args.k.size(args.is_packed() ? 0 : 1);
  for (int64_t size : {args.num_users(), num_rows, args.q.size(3)}) {
    STD_TORCH_CHECK(size <= kMax, "ikbo::", args.op, ": U, ", letter, " and D must be at most ",
                    kMax, "; got ", size);
  }
}

TargetAttentionParams make_params(const AttentionArgs& args) {
  TargetAttentionParams params;
  params.num_users = static_cast<int32_t>(args.num_users());
  params.num_candidates = static_cast<int32_t>(args.q.size(0));
  params.num_queries = static_cast<int32_t>(args.q.size(1));
  params.num_keys = args.is_packed() ? 0 : static_cast<int32_t>(args.k.size(1));
  params.num_heads = static_cast<int32_t>(args.q.size(2));
  params.num_kv_heads = static_cast<int32_t>(args.num_kv_heads());
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

ScalarType lse_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

std::tuple<Tensor, Tensor> run_attention_cpu(const AttentionArgs& args) {
  const AttentionRun run(args);
  const TargetAttentionConfig config = select_target_attention_config(run.params);
  trace_kernel(args.op, config);
  if (!is_empty(run.params)) {
    const TargetAttentionPlan plan(run.params, config);
    const CpuIsa isa = native_cpu_isa();
    std::atomic<int64_t> next_task{0};
    run_on_threads(plan.tasks().size(),
                   [&] { run_target_attention(run.params, plan, isa, next_task); });
  }
  return {run.out, run.lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> run_two_attentions_cpu(const AttentionArgs& first,
                                                                  const AttentionArgs& second) {
  const AttentionRun first_run(first);
  const AttentionRun second_run(second);
  TargetAttentionParams both = second_run.params;
  both.num_candidates = both.num_candidates * both.num_queries +
                        first_run.params.num_candidates * first_run.params.num_queries;
  both.num_queries = 1;
  const TargetAttentionConfig config = select_target_attention_config(both);
  trace_kernel(second.op, config);
  const TargetAttentionPlan first_plan(first_run.params, config);
  const TargetAttentionPlan second_plan(second_run.params, config);
  const CpuIsa isa = native_cpu_isa();
  std::atomic<int64_t> next_of_first{0};
  std::atomic<int64_t> next_of_second{0};
  run_on_threads(first_plan.tasks().size() + second_plan.tasks().size(), [&] {
    run_target_attention(first_run.params, first_plan, isa, next_of_first);
    run_target_attention(second_run.params, second_plan, isa, next_of_second);
  });
  return {first_run.out, second_run.out, first_run.lse, second_run.lse};
}

std::tuple<Tensor, Tensor, Tensor> run_attention_backward_cpu(const AttentionArgs& args,
                                                              const AttentionGrads& grads,
                                                              const Tensor& out,
                                                              const Tensor& lse) {
  AttentionCall call(args);
  const Tensor out_grads = torch::stable::contiguous(grads.out);
  const Tensor lse_grads = torch::stable::contiguous(grads.lse);
  Tensor grad_q = torch::stable::new_zeros(args.q, args.q.sizes());
  Tensor grad_k = torch::stable::new_zeros(args.k, args.k.sizes());
  Tensor grad_v = torch::stable::new_zeros(args.v, args.v.sizes());
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
    std::atomic<int64_t> next_task{0};
    run_on_threads(plan.tasks().size(),
                   [&] { run_target_attention_backward(params, plan, isa, next_task); });
  }
  return {grad_q, grad_k, grad_v};
}

}  // namespace ikbo::ops
