// SPDX-License-Identifier: Apache-2.0
#include "kernels/lce/lce_sm90_instance.cuh"

template ikbo::lce_impl::Sm90Instance ikbo::lce_impl::make_sm90_instance<192>(DType dtype);
