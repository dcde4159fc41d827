// SPDX-License-Identifier: Apache-2.0
// act(w_cand x_cand[b] + (w_user x_user + bias)[i(b)]): the user part is one GEMM at U; its rows
// are gathered to where the sum is built, and the candidate GEMM adds onto them.
#include "cpu/linear_cpu.h"

#include <algorithm>

#include "common/kernel_trace.h"
#include "cpu/linear_config.h"
#include "cpu/onednn.h"
#include "cpu/user_rows.h"

namespace ikbo::cpu {
namespace {

// [U, M] in the type of the sum.
Tensor user_part(const Tensor& x_user, const Tensor& w_user, const std::optional<Tensor>& bias) {
  const Tensor x = widen(x_user);
  const Tensor w = transposed(widen(w_user));
  const Tensor y = empty({x.size(0), w.size(1)}, x.scalar_type());
  if (bias.has_value()) {
    addmm_out(y, widen(*bias), x, w);
  } else {
    mm_out(y, x, w);
  }
  return y;
}

// oneDNN builds code per number of rows: these many, or a multiple of the smaller number of them.
constexpr int64_t kOneDnnRows = 256;
constexpr int64_t kOneDnnRowStep = 32;

// out += x w^T
void add_product(const Tensor& out, const Tensor& x, const Tensor& w) {
  const int64_t num_rows = x.size(0);
  Tensor dense_w = w;
  int64_t begin = 0;
  while (begin < num_rows) {
    int64_t count = std::min(kOneDnnRows, num_rows - begin) / kOneDnnRowStep * kOneDnnRowStep;
    if (!prefers_onednn(x.scalar_type(), count, w.size(0), w.size(1))) {
      break;
    }
    // NOTE: when a weight's rows stand apart, as in the two halves of one weight, oneDNN falls back
    // to reference code that is 500 times slower.
    dense_w = torch::stable::contiguous(dense_w);
    Tensor block = rows(out, begin, count);
    torch::stable::copy_(block, onednn_addmm(block, rows(x, begin, count), dense_w));
    begin += count;
  }
  if (begin < num_rows) {
    const Tensor rest = rows(out, begin, num_rows - begin);
    addmm_out(rest, rest, rows(x, begin, num_rows - begin), transposed(w));
  }
}

}  // namespace

Tensor linear(const Tensor& x_user, const Tensor& x_cand, const Tensor& w_user,
              const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user,
              Activation activation) {
  const LinearSizes sizes{.num_users = x_user.size(0),
                          .num_candidates = x_cand.size(0),
                          .m = w_cand.size(0),
                          .k_user = x_user.size(1),
                          .k_cand = x_cand.size(1)};
  const ScalarType dtype = x_cand.scalar_type();
  const ScalarType wide = sum_dtype(dtype);
  const Tensor index = checked_index("linear", cand_to_user, sizes.num_users);
  const Tensor out = empty({sizes.num_candidates, sizes.m}, dtype);
  if (out.numel() == 0) {
    return out;
  }
  const LinearConfig config = select_linear_config(sizes, wide != dtype);
  trace_kernel("linear", config);

  const Tensor y_user = user_part(x_user, w_user, bias);
  const Tensor w = widen(w_cand);
  if (!config.is_upcast) {
    gather_user_rows(out, y_user, index);
    add_product(out, x_cand, w);
    apply_activation(out, activation);
    return out;
  }
  const Tensor x_block = empty({config.rows_per_block, sizes.k_cand}, wide);
  const Tensor y_block = empty({config.rows_per_block, sizes.m}, wide);
  for (int64_t begin = 0; begin < sizes.num_candidates; begin += config.rows_per_block) {
    const int64_t count = std::min(config.rows_per_block, sizes.num_candidates - begin);
    Tensor x = rows(x_block, 0, count);
    const Tensor y = rows(y_block, 0, count);
    torch::stable::copy_(x, rows(x_cand, begin, count));
    gather_user_rows(y, y_user, rows(index, begin, count));
    add_product(y, x, w);
    apply_activation(y, activation);
    Tensor result = rows(out, begin, count);
    torch::stable::copy_(result, y);
  }
  return out;
}

}  // namespace ikbo::cpu
