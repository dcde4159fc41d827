// SPDX-License-Identifier: Apache-2.0
// The Open Inference Protocol v2 over gRPC, with the health and the reflection service. gRPC's own
// headers stay in the .cpp file.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "server/core.h"
#include "server/log.h"
#include "server/tls.h"

namespace ikbo::server {

struct GrpcOptions {
  std::string host = "127.0.0.1";  // an address of this machine
  std::uint16_t port = 8001;       // 0: any free one
  std::size_t max_message_bytes = std::size_t{64} << 20;
  std::size_t max_connections = 512;
  std::size_t max_calls = 2048;  // of one connection at once; its client holds back what is more
  // Of a connection without calls; one with calls from which nothing comes is pinged after it.
  std::chrono::milliseconds idle_timeout{60'000};
  std::chrono::milliseconds handshake_timeout{10'000};  // of a new connection, and of a ping
  // A connection is asked to end (GOAWAY) so many idle timeouts after its start, and calls that are
  // in it still have the drain timeout: one whose message never ends keeps its place no longer.
  int max_age_in_idle_timeouts = 10;
  std::chrono::milliseconds drain_timeout{30'000};
};

class GrpcServer {
 public:
  // Listens and serves from here on; throws ikbo::Error when the address cannot be used. Core and
  // logger must outlive the server.
  GrpcServer(const GrpcOptions& options, const TlsOptions& tls, Core& core, const Logger& logger);
  ~GrpcServer();

  std::uint16_t port() const;

  // Takes no more calls and cancels those that are still under way after `timeout`. Returns at
  // once.
  void stop(std::chrono::milliseconds timeout);
  // Waits for what `stop` began. False: some calls were still under way after the timeout.
  bool wait_stopped();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ikbo::server
