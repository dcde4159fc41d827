// SPDX-License-Identifier: Apache-2.0
#include "cpu/onednn.h"

#include <array>
#include <optional>
#include <stdexcept>
#include <string>

namespace ikbo::cpu {
namespace {

// Below, oneDNN's call (about 20 us, with the reordering of the weight) costs what its speed gains;
// AMD EPYC with AVX-512, torch 2.11.0, 2 threads, rows x m x k: 64 x 256 x 256 takes 44 us in
// both libraries, 128 x 256 x 256 65 against 82 us, 1024 x 512 x 866 1.9 against 4.2 ms.
constexpr int64_t kLeastMultiplyAdds = int64_t{1} << 22;

// False in a PyTorch that was built without oneDNN.
bool has_onednn() {
  const Tensor one = empty({1, 1}, ScalarType::Float);
  try {
    onednn_addmm(one, one, one);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// NOTE: MKL runs its AVX2 code on processors of other vendors than Intel, oneDNN AVX-512 wherever
// there is any: about twice as fast. On Intel's both run AVX-512 and MKL needs no reordering.
bool is_onednn_faster() {
#if defined(__x86_64__)
  static const bool is_faster =
      !__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512f") && has_onednn();
  return is_faster;
#else
  return false;
#endif
}

}  // namespace

bool prefers_onednn(ScalarType dtype, int64_t rows, int64_t m, int64_t k) {
  return dtype == ScalarType::Float && rows * m * k >= kLeastMultiplyAdds && is_onednn_faster();
}

Tensor onednn_addmm(const Tensor& self, const Tensor& a, const Tensor& w) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack{from(a), from(self), from(w), from(std::optional<Tensor>()),
                                    from(std::string("add"))};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("mkldnn::_linear_pointwise", "binary", stack.data(),
                                               TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace ikbo::cpu
