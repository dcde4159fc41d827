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
  Worker(const Tensor& out, const PickedMatrices* init, const std::vector<BatchedProduct>& products,
         const BatchedGemmConfig& config)
      : out_(out), init_(init), products_(products), config_(config) {
    if (!config.is_upcast) {
      return;
    }
    const ScalarType wide = sum_dtype(out.scalar_type());
    int64_t most_rows = 0;
    for (const BatchedProduct& product : products) {
      most_rows = std::max(most_rows, product.b.size(1));
    }
    wide_b_ = empty({config.items_per_call, most_rows, out.size(2)}, wide);
    wide_out_ = empty({config.items_per_call, out.size(1), out.size(2)}, wide);
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

  // Items from `begin` on that share the matrix a of every product.
  int64_t run_length(int64_t begin, int64_t end) const {
    for (const auto& [a, b] : products_) {
      int64_t item = begin + 1;
      while (item < end && matrix_of(a, item) == matrix_of(a, begin)) {
        ++item;
      }
      end = item;
    }
    return end - begin;
  }

  void run_call(int64_t begin, int64_t count) {
    Tensor result = items_of(out_, begin, count, out_.stride(0));
    const Tensor sum = config_.is_upcast ? rows(wide_out_, 0, count) : result;
    for (std::size_t i = 0; i < products_.size(); ++i) {
      const PickedMatrices& matrices = products_[i].a;
      const Tensor a = items_of(matrices.matrices, matrix_of(matrices, begin), count, 0);
      const Tensor b = operand_b(products_[i].b, begin, count);
      if (i > 0) {
        add_product(sum, a, b);
      } else if (init_ == nullptr) {
        bmm_out(sum, a, b);
      } else {
        add_product_to_init(sum, a, b, begin);
      }
    }
    if (config_.is_upcast) {
      torch::stable::copy_(result, sum);
    }
  }

  // Items of b in the type of the sum.
  Tensor operand_b(const Tensor& items, int64_t begin, int64_t count) {
    const Tensor b = items_of(items, begin, count, items.stride(0));
    if (!config_.is_upcast) {
      return b;
    }
    Tensor wide = rows(wide_b_, 0, count);
    wide = torch::stable::narrow(wide, 1, 0, b.size(1));
    torch::stable::copy_(wide, b);
    return wide;
  }

  static bool is_for_onednn(const Tensor& out, const Tensor& a) {
    return out.size(0) == 1 &&
           prefers_onednn(out.scalar_type(), out.size(1), out.size(2), a.size(2));
  }

  // out = self + a @ b for one item, all with a leading dimension of 1.
  static void onednn_product(const Tensor& out, const Tensor& self, const Tensor& a,
                             const Tensor& b) {
    Tensor item = torch::stable::select(out, 0, 0);
    const Tensor weight = transposed(torch::stable::select(b, 0, 0));
    torch::stable::copy_(item, onednn_addmm(torch::stable::select(self, 0, 0),
                                            torch::stable::select(a, 0, 0), weight));
  }

  static void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
    if (is_for_onednn(out, a)) {
      return onednn_product(out, out, a, b);
    }
    baddbmm_out(out, out, a, b);
  }

  void add_product_to_init(const Tensor& out, const Tensor& a, const Tensor& b,
                           int64_t first_item) const {
    if (is_for_onednn(out, a)) {
      const Tensor init = items_of(init_->matrices, matrix_of(*init_, first_item), 1, 0);
      return onednn_product(out, init, a, b);
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
  const std::vector<BatchedProduct>& products_;
  const BatchedGemmConfig& config_;
  Tensor wide_b_;
  Tensor wide_out_;
};

}  // namespace

void batched_gemm(const Tensor& out, const PickedMatrices* init,
                  const std::vector<BatchedProduct>& products, const BatchedGemmConfig& config) {
  int64_t k = 0;
  for (const BatchedProduct& product : products) {
    k += product.b.size(1);
  }
  const int64_t multiply_adds = std::max<int64_t>(1, out.size(1) * out.size(2) * k);
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplyAdds / multiply_adds);
  torch::stable::parallel_for(0, out.size(0), grain, [&](int64_t begin, int64_t end) {
    Worker(out, init, products, config).run(begin, end);
  });
}

}  // namespace ikbo::cpu
