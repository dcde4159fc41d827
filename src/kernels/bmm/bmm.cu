// SPDX-License-Identifier: Apache-2.0
// ikbo::bmm on CUDA: groups the candidates by user, then runs the chosen kernel.
#include "kernels/bmm/bmm_generic.h"
#include "kernels/bmm/bmm_sm90_launch.h"
#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"

namespace ikbo {
namespace bmm_impl {
namespace {

void launch_instance(const Sm90Launch& launch) {
  switch (launch.config.tile_p) {
    case 64:
      return launch_sm90<64>(launch);
    case 128:
      return launch_sm90<128>(launch);
    case 192:
      return launch_sm90<192>(launch);
    case 256:
      return launch_sm90<256>(launch);
    default:
      detail::throw_error(__FILE__, __LINE__, "ikbo::bmm: no bmm_sm90 kernel with tile_p ",
                          launch.config.tile_p, "; there are 64, 128, 192, 256");
  }
}

}  // namespace
}  // namespace bmm_impl

void bmm(const BmmParams& params, const BmmCudaConfig& config, const DeviceLimits& limits,
         void* workspace, Stream stream) {
  if (params.num_candidates == 0 || params.p == 0 || params.n == 0) return;
  IKBO_CHECK(config.kernel != BmmKernel::kNone, "ikbo::bmm: a CUDA kernel is needed; got ",
             to_string(config));
  host::check_indices("bmm", params.cand_to_user, params.num_candidates, params.num_users, stream);
  auto* bytes = static_cast<unsigned char*>(workspace);
  const bool is_sm90 = config.kernel == BmmKernel::kSm90;
  if (is_sm90) {
    if (!bmm_impl::groups_in_each_cta(params)) bmm_impl::launch_list(params, bytes, stream);
    bmm_impl::launch_instance({.params = params,
                               .config = config,
                               .workspace = bytes,
                               .num_sms = limits.num_sms,
                               .stream = stream});
  } else {
    bmm_impl::launch_group(params, bytes, stream);
    bmm_impl::launch_generic(params, config, limits.num_sms, bytes, stream);
  }
}

}  // namespace ikbo
