// SPDX-License-Identifier: Apache-2.0
// What the protocols of one process share.
#pragma once

#include <atomic>

#include "server/metrics.h"
#include "server/served_models.h"

namespace ikbo::server {

struct Core {
  ServedModels models;
  ServerMetrics metrics;
  std::atomic<bool> is_stopping = false;  // from here on the process says that it is not ready
};

}  // namespace ikbo::server
