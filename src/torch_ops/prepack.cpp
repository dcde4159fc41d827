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

// Columns of the weight that meet part i.
Tensor columns_of(const Tensor& w_cand, const std::vector<int64_t>& k_cand, std::size_t part) {
  Tensor w = w_cand;
  const int64_t begin = std::accumulate(k_cand.begin(), k_cand.begin() + part, int64_t{0});
  return torch::stable::narrow(w, 1, begin, k_cand[part]);
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
  std::vector<int64_t> begins{0};
  for (const int64_t k : format.k_cand) {
    begins.push_back(begins.back() + lce_padded_k(static_cast<int32_t>(k)));
  }
  Tensor padded = torch::stable::new_zeros(w_cand, {format.m, begins.back()});
  for (std::size_t part = 0; part < format.k_cand.size(); ++part) {
    Tensor columns = torch::stable::narrow(padded, 1, begins[part], format.k_cand[part]);
    torch::stable::copy_(columns, columns_of(w_cand, format.k_cand, part));
  }
  lce_pack(padded.const_data_ptr(), padded.stride(0), padded.stride(1), m,
           static_cast<int32_t>(begins.back()), dtype,
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
  for (std::size_t part = 0; part < k_cand.size(); ++part) {
    Tensor block = packed_block(packed, format, part);
    torch::stable::copy_(block, columns_of(w_cand, k_cand, part));
  }
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
