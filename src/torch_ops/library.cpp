// SPDX-License-Identifier: Apache-2.0
// The operator library itself, and ikbo::_select_kernel: the kernel that an operator would launch.
#include <torch/csrc/stable/library.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/bmm_config.h"
#include "cpu/expand_config.h"
#include "cpu/lce_config.h"
#include "cpu/linear_config.h"
#include "ikbo/target_attention.h"
#include "torch_ops/kernel_query.h"

namespace ikbo::ops {
namespace {

std::string select_expand(const KernelQuery&) { return to_string(cpu::select_expand_config()); }

std::string select_linear(const KernelQuery& query) {
  return to_string(cpu::select_linear_config({.num_users = query.num_users,
                                              .num_candidates = query.num_candidates,
                                              .m = query.dims[0],
                                              .k_user = query.dims[1],
                                              .k_cand = query.dims[2]},
                                             query.is_16_bit()));
}

std::string select_lce(const KernelQuery& query) {
  return to_string(cpu::select_lce_config({.num_users = query.num_users,
                                           .num_candidates = query.num_candidates,
                                           .m = query.dims[0],
                                           .n = query.dims[1],
                                           .k_user = query.dims[2],
                                           .k_cand = query.dims[3]},
                                          query.is_16_bit()));
}

std::string select_bmm(const KernelQuery& query) {
  return to_string(cpu::select_bmm_config({.num_users = query.num_users,
                                           .num_candidates = query.num_candidates,
                                           .p = query.dims[0],
                                           .r = query.dims[1],
                                           .n = query.dims[2]},
                                          query.is_16_bit()));
}

std::string select_target_attention(const KernelQuery& query) {
  return to_string(select_target_attention_config({
      .num_users = static_cast<int32_t>(query.num_users),
      .num_candidates = static_cast<int32_t>(query.num_candidates),
      .num_queries = static_cast<int32_t>(query.dims[0]),
      .num_keys = static_cast<int32_t>(query.dims[1]),
      .num_heads = static_cast<int32_t>(query.dims[2]),
      .num_kv_heads = static_cast<int32_t>(query.dims[3]),
      .head_dim = static_cast<int32_t>(query.dims[4]),
      .dtype = query.dtype == "float64" ? DType::kFloat64 : DType::kFloat32,
  }));
}

// Its choice depends on no length of a history.
std::string select_packed_target_attention(const KernelQuery& query) {
  const auto& dims = query.dims;
  return select_target_attention({.dtype = query.dtype,
                                  .num_users = query.num_users,
                                  .num_candidates = query.num_candidates,
                                  .dims = {dims[0], 0, dims[1], dims[2], dims[3]},
                                  .layout = {}});
}

// Of all rows together: those of the histories and those of the candidates.
std::string select_self_target_attention(const KernelQuery& query) {
  const auto& dims = query.dims;
  const int64_t rows = query.num_users * dims[1] + query.num_candidates * dims[0];
  return select_target_attention({.dtype = query.dtype,
                                  .num_users = query.num_users,
                                  .num_candidates = rows,
                                  .dims = {1, dims[1], dims[2], dims[3], dims[4]},
                                  .layout = {}});
}

struct Selector {
  std::string_view op;
  const char* dims;  // the operator's remaining sizes, in order
  std::size_t num_dims;
  std::string (*select)(const KernelQuery&);
};

constexpr std::array kCpuSelectors{
    Selector{"bmm", "[P, R, N]", 3, select_bmm},
    Selector{"expand", "[row elements]", 1, select_expand},
    Selector{"lce", "[M, N, K_user, K_cand]", 4, select_lce},
    Selector{"linear", "[M, K_user, K_cand]", 3, select_linear},
    Selector{"self_target_attention", "[Q, S, H, H_kv, D]", 5, select_self_target_attention},
    Selector{"target_attention", "[Q, S, H, H_kv, D]", 5, select_target_attention},
    Selector{"target_attention.packed", "[Q, H, H_kv, D]", 4, select_packed_target_attention},
};

// Devices without kernels of ours all run the composite. kernel_query.h says what `layout` is.
std::string select_kernel(const std::string& op, const std::string& device,
                          const std::string& dtype, int64_t num_users, int64_t num_candidates,
                          const std::vector<int64_t>& dims, const std::vector<int64_t>& layout) {
  for (const Selector& selector : kCpuSelectors) {
    if (selector.op != op) {
      continue;
    }
    STD_TORCH_CHECK(dims.size() == selector.num_dims, "ikbo::_select_kernel: dims of ", op,
                    " must be ", selector.dims, "; got ", dims.size(), " values");
    const KernelQuery query{dtype, num_users, num_candidates, dims, layout};
#ifdef IKBO_WITH_CUDA
    if (device == "cuda") {
      return select_cuda_kernel(op, query);
    }
#endif
    return device == "cpu" ? selector.select(query) : "composite";
  }
  STD_TORCH_CHECK(false, "ikbo::_select_kernel: op must be an operator of ikbo; got '", op, "'");
}

}  // namespace

STABLE_TORCH_LIBRARY(ikbo, m) {
  m.def(
      "_select_kernel(str op, str device, str dtype, int num_users, int num_candidates, "
      "int[] dims, int[] layout=[]) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("_select_kernel", TORCH_BOX(&select_kernel));
}

}  // namespace ikbo::ops
