// SPDX-License-Identifier: Apache-2.0
// a_user[i(b)] @ b_cand[b]: the user's matrix is read where it lies, never replicated.
#include "cpu/bmm_cpu.h"

#include "common/kernel_trace.h"
#include "cpu/bmm_config.h"
#include "cpu/user_rows.h"

namespace ikbo::cpu {

Tensor bmm(const Tensor& a_user, const Tensor& b_cand, const Tensor& cand_to_user) {
  const BmmSizes sizes{.num_users = a_user.size(0),
                       .num_candidates = b_cand.size(0),
                       .p = a_user.size(1),
                       .r = a_user.size(2),
                       .n = b_cand.size(2)};
  const ScalarType dtype = b_cand.scalar_type();
  const Tensor index = checked_index("bmm", cand_to_user, sizes.num_users);
  const Tensor out = empty({sizes.num_candidates, sizes.p, sizes.n}, dtype);
  if (out.numel() == 0) {
    return out;
  }
  const BatchedGemmConfig config = select_bmm_config(sizes, sum_dtype(dtype) != dtype);
  trace_kernel("bmm", config);
  const PickedMatrices a{widen(a_user), index.const_data_ptr<int32_t>()};
  batched_gemm(out, nullptr, a, {b_cand}, config);
  return out;
}

}  // namespace ikbo::cpu
