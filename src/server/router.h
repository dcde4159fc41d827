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

  // Throws RequestError unless `authorization`, the value of that header, lets the sender ask for
  // `target`. To be called before a body is read, and before `handle`.
  void authorize(std::string_view target, std::string_view authorization) const;
  // Calls `finish` exactly once, now or later from a worker of the model's batcher.
  void handle(HttpRequest request, const Finish& finish);
  // The reply for a request that never got here; counts it as handle does.
  HttpReply error_reply(const RequestError& error) const;

 private:
  struct Path;

  void route(const Path& path, HttpRequest& request, const Finish& finish);
  void route_model(const Path& path, HttpRequest& request, const Finish& finish);
  void route_repository(const Path& path, HttpRequest& request, const Finish& finish);
  void infer(const ServedModels::Handle& model, HttpRequest& request, const Finish& finish);
  HttpReply infer_reply(ServedModel& model, const struct InferCall& call,
                        const Batcher::Outcome& outcome,
                        const std::shared_ptr<RequestRecord>& record) const;
  static HttpReply ready_reply(bool is_ready, std::string text);

  Core& core_;
};

}  // namespace ikbo::server
