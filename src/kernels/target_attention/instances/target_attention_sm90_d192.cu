// SPDX-License-Identifier: Apache-2.0
#include "kernels/target_attention/target_attention_sm90_instance.cuh"

template void ikbo::target_attention_impl::launch_sm90<192>(const Sm90Launch& launch);
