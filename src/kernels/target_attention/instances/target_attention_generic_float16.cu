// SPDX-License-Identifier: Apache-2.0
#include "kernels/target_attention/target_attention_generic_instance.cuh"

template void ikbo::target_attention_impl::launch_generic_of<__half>(const GenericLaunch&);
