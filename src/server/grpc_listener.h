// SPDX-License-Identifier: Apache-2.0
// Accepts gRPC's connections. The library would do that, too, but it neither limits their number
// nor tells when one ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/log.h"
#include "server/metrics.h"

namespace ikbo::server {

class GrpcListener {
 public:
  // Gets a connected socket that does not block, and closes it in the end.
  using Take = std::function<void(int listener, int socket)>;

  // Listens from here on; throws ikbo::Error when the address cannot be used. Metrics and logger
  // must outlive it.
  GrpcListener(const std::string& host, std::uint16_t port, std::size_t max_connections,
               ServerMetrics& metrics, const Logger& logger);
  ~GrpcListener();

  std::uint16_t port() const;

  // Accepts on a thread of its own, which calls `take`. Once.
  void start(Take take);
  // Accepts no more; `take` is not called any more. May be called again.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ikbo::server
