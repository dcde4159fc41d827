// SPDX-License-Identifier: Apache-2.0
// x_user[cand_to_user]: whole rows copied, whatever the element type.
#include "cpu/expand_cpu.h"

#include <vector>

#include "common/kernel_trace.h"
#include "cpu/expand_config.h"
#include "cpu/user_rows.h"

namespace ikbo::cpu {

Tensor expand(const Tensor& x_user, const Tensor& cand_to_user) {
  const Tensor index = checked_index("expand", cand_to_user, x_user.size(0));
  const auto user_sizes = x_user.sizes();
  std::vector<int64_t> sizes(user_sizes.begin(), user_sizes.end());
  sizes[0] = index.numel();
  const Tensor out = torch::stable::empty(sizes, x_user.scalar_type());
  trace_kernel("expand", select_expand_config());
  gather_user_rows(out, torch::stable::contiguous(x_user), index);
  return out;
}

}  // namespace ikbo::cpu
