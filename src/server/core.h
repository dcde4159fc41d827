// SPDX-License-Identifier: Apache-2.0
// What the protocols of one process share.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "server/access.h"
#include "server/memory_budget.h"
#include "server/metrics.h"
#include "server/served_models.h"

namespace ikbo::server {

struct Core {
  explicit Core(std::size_t max_request_memory, AccessTokens tokens = {})
      : access(std::move(tokens)), request_memory(max_request_memory) {}

  const AccessTokens access;

  ServedModels models;
  ServerMetrics metrics;
  MemoryBudget request_memory;
  std::atomic<bool> is_stopping = false;  // from here on the process says that it is not ready
};

}  // namespace ikbo::server
