// SPDX-License-Identifier: Apache-2.0
// What the protocols of one process share.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "server/access.h"
#include "server/background.h"
#include "server/memory_budget.h"
#include "server/metrics.h"
#include "server/model_repository.h"
#include "server/request_error.h"
#include "server/request_observer.h"
#include "server/served_models.h"
#include "server/wire_names.h"

namespace ikbo::server {

struct Core {
  explicit Core(std::size_t max_request_memory, AccessTokens tokens = {})
      : access(std::move(tokens)), request_memory(max_request_memory) {}

  const AccessTokens access;

  // Whether requests are welcome: to a load balancer, all of the process or nothing of it.
  bool is_ready() const { return !is_stopping && models.are_ready(); }

  // What the server's metadata list.
  std::vector<std::string_view> extensions() const {
    std::vector<std::string_view> names = {kBinaryExtension};
    if (repository.has_value() && repository->allows_changes()) {
      names.push_back(kRepositoryExtension);
    }
    return names;
  }

  // For requests about it. Throws RequestError(kForbidden) unless clients may change it.
  ModelRepository& changeable_repository() {
    if (!repository.has_value() || !repository->allows_changes()) {
      refuse(ErrorKind::kForbidden,
             "requests about the repository need a server with --allow-repository-changes; this "
             "one runs without");
    }
    return *repository;
  }

  // In this order: each may use what is above it until it ends.
  std::atomic<bool> is_stopping = false;  // from here on it is not ready
  ServerMetrics metrics;
  MemoryBudget request_memory;
  std::optional<RequestObserver> observer;  // none: requests are neither logged nor traced
  Background background;
  ServedModels models{background};
  std::optional<ModelRepository> repository;  // none: what is served never changes
};

}  // namespace ikbo::server
