// SPDX-License-Identifier: Apache-2.0
// w_cand e_cand[b] + (w_user e_user + bias)[i(b)]: the user part is built at U; each candidate's
// result starts as a copy of its user's part, and a GEMM adds the candidate's product to it.
#include "cpu/lce_cpu.h"

#include "common/kernel_trace.h"
#include "cpu/lce_config.h"
#include "cpu/user_rows.h"

namespace ikbo::cpu {
namespace {

// A weight [M, K] as the one matrix that all items share.
PickedMatrices shared_weight(const Tensor& w) {
  Tensor wide = widen(w);
  return {torch::stable::unsqueeze(wide, 0)};
}

// [U, M, N] in the type of the sum.
Tensor user_part(const Tensor& e_user, const Tensor& w_user, const std::optional<Tensor>& bias) {
  const Tensor e = widen(e_user);
  const PickedMatrices w = shared_weight(w_user);
  const Tensor y = empty({e.size(0), w_user.size(0), e.size(2)}, e.scalar_type());
  const BatchedGemmConfig config =
      select_batched_gemm_config(w_user.size(0), e.size(1), e.size(2), false);
  if (!bias.has_value()) {
    batched_gemm(y, nullptr, w, {e}, config);
    return y;
  }
  PickedMatrices init{empty({1, y.size(1), y.size(2)}, e.scalar_type())};
  torch::stable::copy_(init.matrices, torch::stable::reshape(widen(*bias), {1, y.size(1), 1}));
  batched_gemm(y, &init, w, {e}, config);
  return y;
}

}  // namespace

Tensor lce(const Tensor& e_user, const std::vector<Tensor>& e_cand, const Tensor& w_user,
           const Tensor& w_cand, const std::optional<Tensor>& bias, const Tensor& cand_to_user) {
  const Tensor& first = e_cand.front();
  const LceSizes sizes{.num_users = e_user.size(0),
                       .num_candidates = first.size(0),
                       .m = w_cand.size(0),
                       .n = first.size(2),
                       .k_user = e_user.size(1),
                       .k_cand = w_cand.size(1)};
  const ScalarType dtype = first.scalar_type();
  const Tensor index = checked_index("lce", cand_to_user, sizes.num_users);
  const Tensor out = empty({sizes.num_candidates, sizes.m, sizes.n}, dtype);
  if (out.numel() == 0) {
    return out;
  }
  const BatchedGemmConfig config = select_lce_config(sizes, sum_dtype(dtype) != dtype);
  trace_kernel("lce", config);
  const PickedMatrices init{user_part(e_user, w_user, bias), index.const_data_ptr<int32_t>()};
  batched_gemm(out, &init, shared_weight(w_cand), e_cand, config);
  return out;
}

}  // namespace ikbo::cpu
