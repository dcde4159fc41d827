// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/linear_sm90_instance.cuh"

template void ikbo::linear_impl::launch_sm90<128>(const StageLaunch& launch);
