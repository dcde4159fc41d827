// SPDX-License-Identifier: Apache-2.0
#include "cpu/batched_gemm.h"

#include <torch/csrc/stable/device.h>

#include <cstring>

#include "cpu/onednn.h"

namespace ikbo::cpu {
namespace {

// Multiply-adds that one thread should at least get.
constexpr int64_t kGrainMultiplyAdds = 64 * 1024;

// Items [begin, begin + count) of a [items, rows, columns] tensor, as a tensor that autograd does
// not know: worker threads have not the caller's dispatch state.
Tensor items_of(const Tensor& t, int64_t begin, int64_t count, int64_t stride) {
  auto* data = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  return torch::stable::from_blob(data + begin * t.stride(0) * t.element_size(),
                                  {count, t.size(1), t.size(2)}, {stride, t.stride(1), t.stride(2)},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  t.scalar_type());
}

class Worker {
 public:
  Worker(const Tensor& out, const PickedMatrices* init, const PickedMatrices& a, const Tensor& b,
         const BatchedGemmConfig& config)
      : out_(out), init_(init), a_(a), b_(b), config_(config) {
    if (config.is_upcast) {
      wide_b_ = empty({config.items_per_call, b.size(1), b.size(2)}, a.matrices.scalar_type());
      wide_out_ =
          empty({config.items_per_call, out.size(1), out.size(2)}, a.matrices.scalar_type());
    }
  }

  void run(int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t count = run_length(begin, std::min(end, begin + config_.items_per_call));
      run_call(begin, count);
      begin += count;
    }
  }

 private:
  static int64_t matrix_of(const PickedMatrices& picked, int64_t item) {
    return picked.index == nullptr ? 0 : picked.index[item];
  }

  // Items from `begin` on that share a.
  int64_t run_length(int64_t begin, int64_t end) const {
    int64_t item = begin + 1;
    while (item < end && matrix_of(a_, item) == matrix_of(a_, begin)) {
      ++item;
    }
    return item - begin;
  }

  void run_call(int64_t begin, int64_t count) {
    const Tensor a = items_of(a_.matrices, matrix_of(a_, begin), count, 0);
    Tensor b = items_of(b_, begin, count, b_.stride(0));
    Tensor result = items_of(out_, begin, count, out_.stride(0));
    if (!config_.is_upcast) {
      multiply(result, a, b, begin);
      return;
    }
    Tensor wide_b = rows(wide_b_, 0, count);
    const Tensor wide_out = rows(wide_out_, 0, count);
    torch::stable::copy_(wide_b, b);
    multiply(wide_out, a, wide_b, begin);
    torch::stable::copy_(result, wide_out);
  }

  void multiply(const Tensor& out, const Tensor& a, const Tensor& b, int64_t first_item) const {
    if (init_ == nullptr) {
      bmm_out(out, a, b);
      return;
    }
    if (out.size(0) == 1 &&
        prefers_onednn(out.scalar_type(), out.size(1), out.size(2), a.size(2))) {
      const Tensor init = items_of(init_->matrices, matrix_of(*init_, first_item), 1, 0);
      Tensor item = torch::stable::select(out, 0, 0);
      const Tensor weight = transposed(torch::stable::select(b, 0, 0));
      torch::stable::copy_(item, onednn_addmm(torch::stable::select(init, 0, 0),
                                              torch::stable::select(a, 0, 0), weight));
      return;
    }
    const auto* from = static_cast<const char*>(init_->matrices.const_data_ptr());
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    const int64_t bytes = out.size(1) * out.size(2) * static_cast<int64_t>(out.element_size());
    for (int64_t i = 0; i < out.size(0); ++i) {
      std::memcpy(to + i * bytes, from + matrix_of(*init_, first_item + i) * bytes, bytes);
    }
    baddbmm_out(out, out, a, b);
  }

  const Tensor& out_;
  const PickedMatrices* init_;
  const PickedMatrices& a_;
  const Tensor& b_;
  const BatchedGemmConfig& config_;
  Tensor wide_b_;
  Tensor wide_out_;
};

}  // namespace

void batched_gemm(const Tensor& out, const PickedMatrices* init, const PickedMatrices& a,
                  const Tensor& b, const BatchedGemmConfig& config) {
  const int64_t multiply_adds =
      std::max<int64_t>(1, out.size(1) * out.size(2) * a.matrices.size(2));
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplyAdds / multiply_adds);
  torch::stable::parallel_for(0, out.size(0), grain, [&](int64_t begin, int64_t end) {
    Worker(out, init, a, b, config).run(begin, end);
  });
}

}  // namespace ikbo::cpu
