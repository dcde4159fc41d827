// SPDX-License-Identifier: Apache-2.0
#include "kernels/target_attention_backward/target_attention_backward_instance.cuh"

namespace ikbo::target_attention_backward_impl {

template void launch_products<__nv_bfloat16>(const Args&, const TargetAttentionBackwardConfig&,
                                             std::int64_t, cudaStream_t);

}  // namespace ikbo::target_attention_backward_impl
