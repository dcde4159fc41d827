// SPDX-License-Identifier: Apache-2.0
// ikbo::prepack: a candidate weight in the form that the kernels of its device load, made once.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "torch_ops/packed_weight.h"
#ifdef IKBO_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include "ikbo/lce.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

void check_k_cand(const std::vector<int64_t>& k_cand, int64_t num_columns) {
  const bool fits = !k_cand.empty() && *std::min_element(k_cand.begin(), k_cand.end()) >= 0 &&
                    std::accumulate(k_cand.begin(), k_cand.end(), int64_t{0}) == num_columns;
  STD_TORCH_CHECK(fits, "ikbo::prepack: k_cand must be the K_i of one part or more, with the sum ",
                  num_columns, " (= w_cand.size(1)); got ", list_text(k_cand));
}

void write_header(const Tensor& packed, const PackedFormat& format) {
  const std::vector<int64_t> words = format.header();
  const auto count = static_cast<int64_t>(words.size() * sizeof(int64_t));
  Tensor header = torch::stable::empty({count}, ScalarType::Byte);
  std::memcpy(header.mutable_data_ptr(), words.data(), count);
  Tensor flat = torch::stable::view(packed, {packed.numel()});
  Tensor place = torch::stable::narrow(flat, 0, 0, count);
  torch::stable::copy_(place, header);
}

#ifdef IKBO_WITH_CUDA
void write_image(const Tensor& packed, const PackedFormat& format, const Tensor& w_cand) {
  const int32_t device = w_cand.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const auto m = static_cast<int32_t>(format.m);
  const DType dtype = kernel_dtype(w_cand.scalar_type());
  int32_t padded_k = 0;
  for (const int64_t k : format.k_cand) {
    padded_k += lce_padded_k(static_cast<int32_t>(k));
  }
  Tensor source = w_cand;
  Tensor padded = torch::stable::new_zeros(w_cand, {format.m, padded_k});
  int64_t from = 0;
  int64_t to = 0;
  for (const int64_t k : format.k_cand) {
    Tensor columns = torch::stable::narrow(padded, 1, to, k);
    torch::stable::copy_(columns, torch::stable::narrow(source, 1, from, k));
    from += k;
    to += lce_padded_k(static_cast<int32_t>(k));
  }
  lce_pack(padded.const_data_ptr(), padded.stride(0), padded.stride(1), m, padded_k, dtype,
           select_lce_pack_config(m, dtype, query_device_limits(device)),
           static_cast<char*>(packed.mutable_data_ptr()) + format.image_begin(),
           current_cuda_stream(device));
}
#endif

Tensor prepack(const Tensor& w_cand, const std::vector<int64_t>& k_cand) {
  constexpr const char* kOp = "prepack";
  const Named weight{"w_cand", w_cand};
  check_float_dtypes(kOp, {weight});
  check_rank(kOp, weight, 2, "[M, K_cand]");
  check_k_cand(k_cand, w_cand.size(1));
  const PackedFormat format =
      packed_format(w_cand.device(), w_cand.scalar_type(), w_cand.size(0), k_cand);
  const Tensor packed = torch::stable::new_zeros(w_cand, format.sizes(), ScalarType::Byte);
  write_header(packed, format);
  Tensor matrix = packed_matrix(packed, format);
  torch::stable::copy_(matrix, w_cand);
#ifdef IKBO_WITH_CUDA
  if (format.tile_m > 0) {
    write_image(packed, format, w_cand);
  }
#endif
  return packed;
}

// Sizes of prepack's result, for tracing.
std::vector<int64_t> packed_sizes(torch::stable::Device device, ScalarType dtype, int64_t m,
                                  const std::vector<int64_t>& k_cand) {
  return packed_format(device, dtype, m, k_cand).sizes();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ikbo, m) {
  m.def("prepack(Tensor w_cand, int[] k_cand) -> Tensor");
  m.def("_packed_sizes(Device device, ScalarType dtype, int m, int[] k_cand) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(ikbo, CompositeExplicitAutograd, m) {
  m.impl("prepack", TORCH_BOX(&prepack));
  m.impl("_packed_sizes", TORCH_BOX(&packed_sizes));
}

}  // namespace ikbo::ops
