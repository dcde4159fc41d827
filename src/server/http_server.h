// SPDX-License-Identifier: Apache-2.0
// HTTP/1.1 over TCP or TLS around a Router. The transport's own headers stay in the .cpp files.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/core.h"
#include "server/log.h"
#include "server/router.h"
#include "server/tls.h"

namespace ikbo::server {

struct HttpOptions {
  std::string host = "127.0.0.1";  // an address of this machine
  bool allow_remote = false;       // whether it may be another one than the loopback's
  std::uint16_t port = 8000;       // 0: any free one
  int num_threads = 0;
  std::size_t max_body_bytes = std::size_t{64} << 20;
  std::size_t max_connections = 512;
  std::chrono::milliseconds idle_timeout{60'000};   // between two requests of a connection
  std::chrono::milliseconds read_timeout{10'000};   // for a request's head, and for its body
  std::chrono::milliseconds write_timeout{10'000};  // for a reply
  std::chrono::milliseconds drain_timeout{30'000};  // for what is under way when asked to stop
};

// Throws ikbo::Error for an address that is none, or of which allow_remote says no.
void check_host(const HttpOptions& options);

// Whether the server's certificate has begun and not ended: clients refuse another one. Throws
// ikbo::Error for files that cannot be read or do not fit.
bool is_certificate_current(const TlsOptions& tls);

class HttpServer {
 public:
  // Listens from here on; throws ikbo::Error when the address or a certificate cannot be used.
  // Router, core and logger must outlive the server.
  HttpServer(const HttpOptions& options, const TlsOptions& tls, Router& router, Core& core,
             const Logger& logger);
  ~HttpServer();

  std::uint16_t port() const;

  // Serves until SIGTERM or SIGINT. Then calls `on_stop`, closes the listening socket and idle
  // connections and finishes the requests under way. False: some were still under way after
  // drain_timeout, and their callbacks may still come. Calls `on_hangup` at every SIGHUP.
  bool run(const std::function<void()>& on_stop, const std::function<void()>& on_hangup);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ikbo::server
