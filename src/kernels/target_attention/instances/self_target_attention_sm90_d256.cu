// SPDX-License-Identifier: Apache-2.0
#include "kernels/target_attention/self_target_attention_sm90_instance.cuh"

template void ikbo::target_attention_impl::launch_self_sm90<256>(const Sm90SelfLaunch& launch);
