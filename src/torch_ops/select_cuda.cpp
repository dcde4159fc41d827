// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel an operator takes, by the operators' own choices, without tensors.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <utility>

#include "ikbo/bmm_cuda.h"
#include "ikbo/expand.h"
#include "ikbo/lce.h"
#include "ikbo/linear.h"
#include "ikbo/self_target_attention_cuda.h"
#include "ikbo/target_attention_cuda.h"
#include "torch_ops/kernel_query.h"
#include "torch_ops/packed_weight.h"

namespace ikbo::ops {
namespace {

constexpr const char* kComposite = "composite";

DType dtype_of(const KernelQuery& query) {
  if (query.dtype == "float16") return DType::kFloat16;
  if (query.dtype == "bfloat16") return DType::kBFloat16;
  return query.dtype == "float64" ? DType::kFloat64 : DType::kFloat32;
}

DeviceLimits current_limits() {
  return query_device_limits(torch::stable::accelerator::getCurrentDeviceIndex());
}

struct Operand {
  const void* data = nullptr;  // its distance from an aligned address; never read
  std::array<int64_t, 4> strides{};
  bool is_packed = false;
};

// Reads the layout of a query operand by operand.
class LayoutReader {
 public:
  LayoutReader(const char* op, const KernelQuery& query) : op_(op), query_(query) {}

  bool is_at_end() const { return position_ == query_.layout.size(); }

  int64_t next() {
    STD_TORCH_CHECK(!is_at_end(), "ikbo::_select_kernel: layout of ", op_,
                    " must have a number more for each offset and stride; got ",
                    query_.layout.size(), " values");
    return query_.layout[position_++];
  }

  Operand operand(std::initializer_list<int64_t> contiguous_strides) {
    Operand operand;
    std::size_t d = 0;
    if (query_.layout.empty()) {
      for (const int64_t stride : contiguous_strides) operand.strides[d++] = stride;
      return operand;
    }
    const auto offset = static_cast<std::uintptr_t>(next()) * size_of(dtype_of(query_));
    operand.data = reinterpret_cast<const void*>(offset);
    while (d < contiguous_strides.size()) operand.strides[d++] = next();
    return operand;
  }

  // w_cand [M, k], which may be packed.
  Operand weight(int64_t m, int64_t k) {
    Operand operand = this->operand({k, 1});
    if (operand.strides[0] < 0) {
      const PackedFormat format{.device = PackedDevice::kCuda,
                                .dtype = query_.is_16_bit() ? ScalarType::Half : ScalarType::Float,
                                .m = m,
                                .k_cand = {k}};
      operand.strides = {format.row_stride(), 1};
      operand.is_packed = true;
    }
    return operand;
  }

 private:
  const char* op_;
  const KernelQuery& query_;
  std::size_t position_ = 0;
};

std::string select_expand(const KernelQuery& query) {
  const auto row_bytes = query.dims[0] * static_cast<int64_t>(size_of(dtype_of(query)));
  return to_string(
      select_expand_config({.num_users = static_cast<int32_t>(query.num_users),
                            .num_candidates = static_cast<int32_t>(query.num_candidates),
                            .row_bytes = row_bytes,
                            .user_stride = row_bytes}));
}

std::string select_linear(const KernelQuery& query) {
  if (query.dtype == "float64") return kComposite;
  const int64_t m = query.dims[0];
  const int64_t k_user = query.dims[1];
  const int64_t k_cand = query.dims[2];
  LayoutReader layout("linear", query);
  const Operand x_user = layout.operand({k_user, 1});
  const Operand x_cand = layout.operand({k_cand, 1});
  const Operand w_user = layout.operand({k_user, 1});
  const Operand w_cand = layout.weight(m, k_cand);
  const LinearParams params{.num_users = static_cast<int32_t>(query.num_users),
                            .num_candidates = static_cast<int32_t>(query.num_candidates),
                            .m = static_cast<int32_t>(m),
                            .k_user = static_cast<int32_t>(k_user),
                            .k_cand = static_cast<int32_t>(k_cand),
                            .dtype = dtype_of(query),
                            .x_user = x_user.data,
                            .x_cand = x_cand.data,
                            .w_user = w_user.data,
                            .w_cand = w_cand.data,
                            .stride_x_user_u = x_user.strides[0],
                            .stride_x_user_k = x_user.strides[1],
                            .stride_x_cand_b = x_cand.strides[0],
                            .stride_x_cand_k = x_cand.strides[1],
                            .stride_w_user_m = w_user.strides[0],
                            .stride_w_user_k = w_user.strides[1],
                            .stride_w_cand_m = w_cand.strides[0],
                            .stride_w_cand_k = w_cand.strides[1]};
  return to_string(select_linear_config(params, current_limits()));
}

// The candidate tensors of a query, in order.
std::vector<LcePart> read_parts(LayoutReader& layout, int64_t n, int64_t k_cand) {
  std::vector<LcePart> parts;
  do {
    const int64_t k = layout.is_at_end() ? k_cand : layout.next();
    const Operand e = layout.operand({k_cand * n, n, 1});
    parts.push_back({.e = e.data,
                     .k = static_cast<int32_t>(k),
                     .stride_b = e.strides[0],
                     .stride_k = e.strides[1],
                     .stride_n = e.strides[2]});
  } while (!layout.is_at_end());
  return parts;
}

std::string select_lce(const KernelQuery& query) {
  if (query.dtype == "float64") return kComposite;
  const int64_t m = query.dims[0];
  const int64_t n = query.dims[1];
  const int64_t k_user = query.dims[2];
  const int64_t k_cand = query.dims[3];
  LayoutReader layout("lce", query);
  const Operand e_user = layout.operand({k_user * n, n, 1});
  const Operand w_user = layout.operand({k_user, 1});
  const Operand w_cand = layout.weight(m, k_cand);
  const std::vector<LcePart> parts = read_parts(layout, n, k_cand);
  LceParams params{.num_users = static_cast<int32_t>(query.num_users),
                   .num_candidates = static_cast<int32_t>(query.num_candidates),
                   .m = static_cast<int32_t>(m),
                   .n = static_cast<int32_t>(n),
                   .k_user = static_cast<int32_t>(k_user),
                   .k_cand = static_cast<int32_t>(k_cand),
                   .dtype = dtype_of(query),
                   .e_user = e_user.data,
                   .e_cand = parts.front().e,
                   .w_user = w_user.data,
                   .w_cand = w_cand.data,
                   .stride_e_user_u = e_user.strides[0],
                   .stride_e_user_k = e_user.strides[1],
                   .stride_e_user_n = e_user.strides[2],
                   .stride_e_cand_b = parts.front().stride_b,
                   .stride_e_cand_k = parts.front().stride_k,
                   .stride_e_cand_n = parts.front().stride_n,
                   .stride_w_user_m = w_user.strides[0],
                   .stride_w_user_k = w_user.strides[1],
                   .stride_w_cand_m = w_cand.strides[0],
                   .stride_w_cand_k = w_cand.strides[1]};
  if (parts.size() > 1) {
    params.cand_parts = parts.data();
    params.num_cand_parts = static_cast<int32_t>(parts.size());
  }
  const DeviceLimits limits = current_limits();
  if (w_cand.is_packed && select_lce_pack_config(params.m, params.dtype, limits).tile_m > 0) {
    params.w_cand_packed = &params;  // some address: only its presence counts
  }
  const LceConfig config = select_lce_config(params, limits);
  return parts.size() > 1 && config.kernel != LceKernel::kSm90 ? kComposite : to_string(config);
}

std::string select_bmm(const KernelQuery& query) {
  const auto [p, r, n] = std::array{query.dims[0], query.dims[1], query.dims[2]};
  LayoutReader layout("bmm", query);
  Operand a = layout.operand({p * r, r, 1});
  Operand b = layout.operand({r * n, n, 1});
  if (!layout.is_at_end() && layout.next() != 0) std::swap(a.strides[1], a.strides[2]);
  if (!layout.is_at_end() && layout.next() != 0) std::swap(b.strides[1], b.strides[2]);
  const BmmParams params{.num_users = static_cast<int32_t>(query.num_users),
                         .num_candidates = static_cast<int32_t>(query.num_candidates),
                         .p = static_cast<int32_t>(p),
                         .r = static_cast<int32_t>(r),
                         .n = static_cast<int32_t>(n),
                         .dtype = dtype_of(query),
                         .a_user = a.data,
                         .b_cand = b.data,
                         .stride_a_u = a.strides[0],
                         .stride_a_p = a.strides[1],
                         .stride_a_r = a.strides[2],
                         .stride_b_b = b.strides[0],
                         .stride_b_r = b.strides[1],
                         .stride_b_n = b.strides[2]};
  return to_string(select_bmm_cuda_config(params, current_limits()));
}

// `dims`: Q, S, H, H_kv, D.
TargetAttentionParams attention_params(const KernelQuery& query, const std::array<int64_t, 5>& dims,
                                       const Operand& q, const Operand& k, const Operand& v) {
  return {.num_users = static_cast<int32_t>(query.num_users),
          .num_candidates = static_cast<int32_t>(query.num_candidates),
          .num_queries = static_cast<int32_t>(dims[0]),
          .num_keys = static_cast<int32_t>(dims[1]),
          .num_heads = static_cast<int32_t>(dims[2]),
          .num_kv_heads = static_cast<int32_t>(dims[3]),
          .head_dim = static_cast<int32_t>(dims[4]),
          .dtype = dtype_of(query),
          .scale = 1.0,
          .q = q.data,
          .k = k.data,
          .v = v.data,
          .stride_q = q.strides,
          .stride_k = k.strides,
          .stride_v = v.strides};
}

// Of packed histories the dims hold no length, and none is asked for.
std::string select_target_attention(const KernelQuery& query, bool is_packed) {
  const auto& dims = query.dims;
  const std::size_t heads_at = is_packed ? 1 : 2;
  const int64_t num_queries = dims[0];
  const int64_t num_keys = is_packed ? 1 : dims[1];
  const auto [num_heads, num_kv_heads, head_dim] =
      std::array{dims[heads_at], dims[heads_at + 1], dims[heads_at + 2]};
  LayoutReader layout("target_attention", query);
  const Operand q =
      layout.operand({num_queries * num_heads * head_dim, num_heads * head_dim, head_dim, 1});
  const int64_t row = num_kv_heads * head_dim;
  const auto history = [&] {
    if (!is_packed) return layout.operand({num_keys * row, row, head_dim, 1});
    Operand operand = layout.operand({row, head_dim, 1});
    operand.strides = {0, operand.strides[0], operand.strides[1], operand.strides[2]};
    return operand;
  };
  const Operand k = history();
  const Operand v = history();
  TargetAttentionParams params =
      attention_params(query, {num_queries, num_keys, num_heads, num_kv_heads, head_dim}, q, k, v);
  const int32_t some_offset = 0;
  if (is_packed) params.user_offsets = &some_offset;  // only its presence counts
  const bool has_mask = !layout.is_at_end() && layout.next() != 0;
  const bool has_positive_scale = layout.is_at_end() || layout.next() != 0;
  if (has_mask) params.user_mask = &has_mask;  // only its presence counts
  if (!has_positive_scale) params.scale = -1.0;
  return to_string(select_target_attention_cuda_config(params, current_limits()));
}

std::string select_self_target_attention(const KernelQuery& query) {
  const std::array dims{query.dims[0], query.dims[1], query.dims[2], query.dims[3], query.dims[4]};
  const auto [num_queries, num_keys, num_heads, num_kv_heads, head_dim] = dims;
  LayoutReader layout("self_target_attention", query);
  const auto rows = [&](int64_t of_entry, int64_t row) {
    return layout.operand({of_entry * row, row, head_dim, 1});
  };
  const Operand q_user = rows(num_keys, num_heads * head_dim);
  const Operand q_cand = rows(num_queries, num_heads * head_dim);
  const Operand k = rows(num_keys, num_kv_heads * head_dim);
  const Operand v = rows(num_keys, num_kv_heads * head_dim);
  const bool has_positive_scale = layout.is_at_end() || layout.next() != 0;
  if (!has_positive_scale) return kComposite;
  const SelfTargetAttentionParams params{.cand = attention_params(query, dims, q_cand, k, v),
                                         .q_user = q_user.data,
                                         .stride_q_user = q_user.strides};
  return to_string(select_self_target_attention_cuda_config(params, current_limits()));
}

}  // namespace

std::string select_cuda_kernel(const std::string& op, const KernelQuery& query) {
  if (op == "bmm") return select_bmm(query);
  if (op == "expand") return select_expand(query);
  if (op == "linear") return select_linear(query);
  if (op == "lce") return select_lce(query);
  if (op == "self_target_attention") return select_self_target_attention(query);
  if (op == "target_attention") return select_target_attention(query, false);
  return op == "target_attention.packed" ? select_target_attention(query, true) : kComposite;
}

}  // namespace ikbo::ops
