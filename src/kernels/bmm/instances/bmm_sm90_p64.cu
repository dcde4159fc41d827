// SPDX-License-Identifier: Apache-2.0
#include "kernels/bmm/bmm_sm90_instance.cuh"

template void ikbo::bmm_impl::launch_sm90<64>(const Sm90Launch& launch);
