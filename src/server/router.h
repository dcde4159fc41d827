// SPDX-License-Identifier: Apache-2.0
// From a request's path to what answers it. Knows the protocol's URLs and nothing of sockets.
#pragma once

#include <atomic>
#include <string>
#include <string_view>

#include "server/http_message.h"
#include "server/metrics.h"
#include "server/request_error.h"
#include "server/served_models.h"

namespace ikbo::server {

// Thread-safe. The models and the metrics must outlive it.
class Router {
 public:
  Router(const ServedModels& models, ServerMetrics& metrics) : models_(models), metrics_(metrics) {}

  // Calls `finish` exactly once, now or later from a worker of the model's batcher.
  void handle(HttpRequest request, const Finish& finish);
  // The reply for a request that never got here; counts it as handle does.
  HttpReply error_reply(const RequestError& error) const;
  // From here on /v2/health/ready says no.
  void set_stopping() { is_stopping_ = true; }

 private:
  struct Path;

  void route(const Path& path, HttpRequest& request, const Finish& finish);
  void route_model(const Path& path, HttpRequest& request, const Finish& finish);
  void infer(ServedModel& model, HttpRequest& request, const Finish& finish);
  HttpReply infer_reply(ServedModel& model, const struct InferCall& call,
                        const Batcher::Outcome& outcome) const;
  HttpReply ready_reply(std::string text) const;

  const ServedModels& models_;
  ServerMetrics& metrics_;
  std::atomic<bool> is_stopping_ = false;
};

}  // namespace ikbo::server
