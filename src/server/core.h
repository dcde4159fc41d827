// SPDX-License-Identifier: Apache-2.0
// What the protocols of one process share.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>

#include "server/memory_budget.h"
#include "server/metrics.h"
#include "server/request_observer.h"
#include "server/served_models.h"

namespace ikbo::server {

struct Core {
  explicit Core(std::size_t max_request_memory) : request_memory(max_request_memory) {}

  ServerMetrics metrics;
  std::optional<RequestObserver> observer;  // none: requests are neither logged nor traced
  ServedModels models;                      // its workers use what is above
  MemoryBudget request_memory;
  std::atomic<bool> is_stopping = false;  // from here on the process says that it is not ready
};

}  // namespace ikbo::server
