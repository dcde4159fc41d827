// SPDX-License-Identifier: Apache-2.0
#include "cpu/aten.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>
#include <string>

namespace ikbo::cpu {
namespace {

void call_in_place(const char* op, const Tensor& t) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

ScalarType sum_dtype(ScalarType dtype) {
  const bool is_16_bit = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  return is_16_bit ? ScalarType::Float : dtype;
}

Tensor widen(const Tensor& t) {
  const ScalarType wide = sum_dtype(t.scalar_type());
  return wide == t.scalar_type() ? t : torch::stable::to(t, wide);
}

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::empty({sizes.begin(), sizes.size()}, dtype);
}

Tensor rows(const Tensor& t, int64_t begin, int64_t count) {
  Tensor view = t;
  return torch::stable::narrow(view, 0, begin, count);
}

Tensor transposed(const Tensor& t) { return torch::stable::transpose(t, -2, -1); }

void mm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

void addmm_out(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(out.get(), self.get(), a.get(), b.get(), 1.0, 1.0));
}

void bmm_out(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_bmm_out(out.get(), a.get(), b.get()));
}

void baddbmm_out(const Tensor& out, const Tensor& self, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_baddbmm_out(out.get(), self.get(), a.get(), b.get(), 1.0, 1.0));
}

void apply_activation(const Tensor& t, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return call_in_place("aten::relu_", t);
    case Activation::kSilu:
      return call_in_place("aten::silu_", t);
    case Activation::kSigmoid:
      return call_in_place("aten::sigmoid_", t);
    case Activation::kGelu: {
      std::array<StableIValue, 2> stack{torch::stable::detail::from(t),
                                        torch::stable::detail::from(std::string("none"))};
      TORCH_ERROR_CODE_CHECK(
          torch_call_dispatcher("aten::gelu_", "", stack.data(), TORCH_ABI_VERSION));
      (void)torch::stable::detail::to<Tensor>(stack[0]);
      return;
    }
  }
}

}  // namespace ikbo::cpu
