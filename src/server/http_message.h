// SPDX-License-Identifier: Apache-2.0
// Requests and replies as the router sees them: HTTP without a transport.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ikbo/runtime/tensor.h"
#include "server/request_body.h"
#include "server/request_record.h"

namespace ikbo::server {

struct HttpRequest {
  std::string method;                       // "GET"
  std::string target;                       // "/v2/models/m/infer"
  std::shared_ptr<const RequestBody> body;  // never null
  std::shared_ptr<RequestRecord> record = std::make_shared<RequestRecord>();  // never null
};

// The body is `text`, then the bytes of `blobs` in order.
struct HttpReply {
  unsigned status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  std::string text;
  std::vector<runtime::Tensor> blobs;
  std::function<void()> on_sent = {};  // called once its first bytes are on their way; may be empty
};

// A reply that is not built yet, so that its receiver chooses the thread that pays for that.
struct PendingReply {
  std::function<HttpReply()> make;
  // Made and sent by the thread that has it, it costs less than waking another one.
  bool is_quick = false;
};

// How a reply gets back: called exactly once, by any thread.
using Finish = std::function<void(PendingReply)>;

}  // namespace ikbo::server
