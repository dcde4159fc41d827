// SPDX-License-Identifier: Apache-2.0
// The command line of ikbo-server.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ikbo/runtime/model.h"
#include "server/batcher.h"
#include "server/grpc_server.h"
#include "server/http_server.h"
#include "server/log.h"
#include "server/tls.h"

namespace ikbo::server {

struct Config {
  std::vector<std::string> models;  // paths of packages
  runtime::ModelOptions model;
  BatcherOptions batcher;
  HttpOptions http;
  bool has_grpc = true;
  GrpcOptions grpc;
  TlsOptions tls;
  LogLevel log_level = LogLevel::kInfo;
};

// Nothing when there is nothing to serve (--help, --version, an unusable flag): the text is printed
// and `exit_code` is set.
std::optional<Config> parse_config(int argc, const char* const* argv, int& exit_code);

}  // namespace ikbo::server
