// SPDX-License-Identifier: Apache-2.0
#include "cpu/batched_gemm.h"

#include <torch/csrc/stable/device.h>

#include <algorithm>
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
  Worker(const Tensor& out, const PickedMatrices* init, const PickedMatrices& a,
         const std::vector<Tensor>& b, const BatchedGemmConfig& config)
      : out_(out), init_(init), a_(a), b_(b), config_(config) {
    if (config.is_upcast) {
      const ScalarType wide = a.matrices.scalar_type();
      wide_b_ = empty({config.items_per_call, a.matrices.size(2), out.size(2)}, wide);
      wide_out_ = empty({config.items_per_call, out.size(1), out.size(2)}, wide);
    }
  }

  void run(int64_t begin, int64_t end) {
    // oneDNN takes one item a call.
    const bool is_onednn =
        !config_.is_upcast && std::any_of(b_.begin(), b_.end(), [this](const Tensor& part) {
          return prefers_onednn(out_.scalar_type(), out_.size(1), out_.size(2), part.size(1));
        });
    const int64_t items = is_onednn ? 1 : config_.items_per_call;
    while (begin < end) {
      const int64_t count = run_length(begin, std::min(end, begin + items));
      if (config_.is_upcast) {
        run_upcast(begin, count);
      } else {
        run_in_place(begin, count);
      }
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

  // One product, over all parts converted next to each other.
  void run_upcast(int64_t begin, int64_t count) {
    Tensor wide_b = rows(wide_b_, 0, count);
    int64_t k = 0;
    for (const Tensor& part : b_) {
      Tensor place = torch::stable::narrow(wide_b, 1, k, part.size(1));
      torch::stable::copy_(place, items_of(part, begin, count, part.stride(0)));
      k += part.size(1);
    }
    const Tensor a = items_of(a_.matrices, matrix_of(a_, begin), count, 0);
    const Tensor sum = rows(wide_out_, 0, count);
    first_product(sum, a, wide_b, begin);
    Tensor result = items_of(out_, begin, count, out_.stride(0));
    torch::stable::copy_(result, sum);
  }

  // A product per part, added up in the result.
  void run_in_place(int64_t begin, int64_t count) const {
    const Tensor result = items_of(out_, begin, count, out_.stride(0));
    Tensor a = items_of(a_.matrices, matrix_of(a_, begin), count, 0);
    int64_t k = 0;
    for (const Tensor& part : b_) {
      const Tensor columns = torch::stable::narrow(a, 2, k, part.size(1));
      const Tensor b = items_of(part, begin, count, part.stride(0));
      if (&part == &b_.front()) {
        first_product(result, columns, b, begin);
      } else {
        add_product(result, columns, b);
      }
      k += part.size(1);
    }
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

  // The init and the first or only product.
  void first_product(const Tensor& out, const Tensor& a, const Tensor& b,
                     int64_t first_item) const {
    if (init_ == nullptr) {
      bmm_out(out, a, b);
      return;
    }
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
  const PickedMatrices& a_;
  const std::vector<Tensor>& b_;
  const BatchedGemmConfig& config_;
  Tensor wide_b_;
  Tensor wide_out_;
};

}  // namespace

void batched_gemm(const Tensor& out, const PickedMatrices* init, const PickedMatrices& a,
                  const std::vector<Tensor>& b, const BatchedGemmConfig& config) {
  const int64_t multiply_adds =
      std::max<int64_t>(1, out.size(1) * out.size(2) * a.matrices.size(2));
  const int64_t grain = std::max<int64_t>(1, kGrainMultiplyAdds / multiply_adds);
  torch::stable::parallel_for(0, out.size(0), grain, [&](int64_t begin, int64_t end) {
    Worker(out, init, a, b, config).run(begin, end);
  });
}

}  // namespace ikbo::cpu
