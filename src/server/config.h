// SPDX-License-Identifier: Apache-2.0
// The configuration of ikbo-server: command line, environment, file, and what the machine has.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "ikbo/runtime/model.h"
#include "server/access.h"
#include "server/batcher.h"
#include "server/grpc_server.h"
#include "server/host_resources.h"
#include "server/http_server.h"
#include "server/log.h"
#include "server/package_files.h"
#include "server/package_gate.h"
#include "server/request_observer.h"
#include "server/tls.h"

namespace ikbo::server {

struct Config {
  PackageSources packages;
  bool allows_repository_changes = false;
  runtime::ModelOptions model;
  runtime::UserCacheOptions user_cache;  // of `model`; no bytes: none
  BatcherOptions batcher;
  bool pins_workers = false;
  CpuSet cpus_beside_workers;  // for all other threads; empty: any
  HttpOptions http;
  bool no_grpc = false;
  GrpcOptions grpc;
  TlsOptions tls;
  AccessOptions access;
  PackageGate gate;
  std::size_t max_request_memory = 0;  // bytes
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  ObserverOptions observer;
  HostResources host;
  bool is_check = false;  // say what is wrong with it, and do not serve
  std::string text;       // the flags in force, as a configuration file
};

// Zeros that stand for a share of the machine are replaced by it. Nothing when there is nothing to
// serve (--help, --version, an unusable flag, key or variable): the text is printed and `exit_code`
// is set.
std::optional<Config> parse_config(int argc, const char* const* argv, int& exit_code);

}  // namespace ikbo::server
