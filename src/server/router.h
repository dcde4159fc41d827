// SPDX-License-Identifier: Apache-2.0
// From a request's path to what answers it. Knows the protocol's URLs and nothing of sockets.
#pragma once

#include <string>
#include <string_view>

#include "server/core.h"
#include "server/http_message.h"
#include "server/request_error.h"

namespace ikbo::server {

// Thread-safe. The core must outlive it.
class Router {
 public:
  explicit Router(Core& core) : core_(core) {}

  // Calls `finish` exactly once, now or later from a worker of the model's batcher.
  void handle(HttpRequest request, const Finish& finish);
  // The reply for a request that never got here; counts it as handle does.
  HttpReply error_reply(const RequestError& error) const;

 private:
  struct Path;

  void route(const Path& path, HttpRequest& request, const Finish& finish);
  void route_model(const Path& path, HttpRequest& request, const Finish& finish);
  void infer(ServedModel& model, HttpRequest& request, const Finish& finish);
  HttpReply infer_reply(ServedModel& model, const struct InferCall& call,
                        const Batcher::Outcome& outcome, RequestRecord& record) const;
  HttpReply ready_reply(std::string text) const;

  Core& core_;
};

}  // namespace ikbo::server
