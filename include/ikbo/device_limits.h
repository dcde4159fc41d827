// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ikbo {

// What a device offers, as far as the choice of a kernel depends on it.
struct DeviceLimits {
  int compute_capability = 0;  // 90 for sm_90
  int num_sms = 0;
};

// Of CUDA device `device`. Throws ikbo::Error.
DeviceLimits query_device_limits(int device);

}  // namespace ikbo
