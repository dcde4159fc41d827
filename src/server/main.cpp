// SPDX-License-Identifier: Apache-2.0
// ikbo-server: load the packages, listen, serve until told to stop.
#include <malloc.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include "ikbo/runtime/model.h"
#include "server/config.h"
#include "server/core.h"
#include "server/grpc_server.h"
#include "server/http_server.h"
#include "server/log.h"
#include "server/router.h"

namespace ikbo::server {
namespace {

// Runs allocate and free the same activations again and again. glibc's defaults hand them back to
// the kernel after each run, and the next one takes a page fault for every page of them.
void keep_freed_memory(const HostResources& host) {
  constexpr std::size_t kMebibyte = 1 << 20;
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 * kMebibyte);
  mallopt(M_TOP_PAD, 64 * kMebibyte);
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(std::min(1024 * kMebibyte, host.memory_bytes / 8)));
}

void load_models(const Config& config, const Logger& logger, ServedModels& models) {
  for (const std::string& path : config.models) {
    const auto package = runtime::Package::open(path);
    models.add(runtime::Model::load(package, config.model), config.batcher);
    const runtime::Manifest& manifest = package.manifest();
    logger.write(LogLevel::kInfo, "model_loaded",
                 {{"path", path},
                  {"model", manifest.model_name},
                  {"version", manifest.model_version},
                  {"max_users", manifest.max_users},
                  {"max_candidates", manifest.max_candidates}});
  }
}

void serve_until_stopped(const Config& config, const Logger& logger, Core& core) {
  Router router(core);
  HttpServer http(config.http, config.tls, router, core, logger);
  std::optional<GrpcServer> grpc;
  if (!config.no_grpc) {
    grpc.emplace(config.grpc, config.tls, core, logger);
  }
  logger.write(
      LogLevel::kInfo, "listening",
      {{"host", config.http.host},
       {"port", http.port()},
       grpc.has_value() ? LogField("grpc_port", grpc->port()) : LogField("grpc_port", "none"),
       {"tls", config.tls.is_enabled() ? "on" : "off"}});
  const bool is_http_drained = http.run([&] {
    core.is_stopping = true;
    if (grpc.has_value()) {
      grpc->stop(config.http.drain_timeout);
    }
  });
  const bool is_drained = is_http_drained && (!grpc.has_value() || grpc->wait_stopped());
  if (!is_drained) {
    logger.write(LogLevel::kError, "drain_timed_out",
                 {{"connections", core.metrics.connections.load()}});
    // A run cannot be interrupted, and it still uses what a return would destroy.
    std::_Exit(EXIT_FAILURE);
  }
}

int check(const Config& config) {
  check_tls(config.tls);
  for (const std::string& path : config.models) {
    runtime::Package::open(path);
  }
  std::printf("# this process has %d cores and %zu bytes of memory\n%s", config.host.cores,
              config.host.memory_bytes, config.text.c_str());
  return EXIT_SUCCESS;
}

int serve(const Config& config, const Logger& logger) {
  check_tls(config.tls);
  logger.write(LogLevel::kInfo, "starting",
               {{"cores", config.host.cores},
                {"memory_bytes", config.host.memory_bytes},
                {"threads", config.http.num_threads},
                {"threads_per_run", config.model.threads_per_run},
                {"max_request_memory", config.max_request_memory}});
  Core core(config.max_request_memory);
  core.observer.emplace(config.observer, logger, core.metrics);
  load_models(config, logger, core.models);
  serve_until_stopped(config, logger, core);
  logger.write(LogLevel::kInfo, "stopped");
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace ikbo::server

int main(int argc, char** argv) {
  int exit_code = EXIT_SUCCESS;
  const auto config = ikbo::server::parse_config(argc, argv, exit_code);
  if (!config.has_value()) {
    return exit_code;
  }
  const ikbo::server::Logger logger(config->log_level, config->log_format);
  ikbo::server::keep_freed_memory(config->host);
  try {
    return config->is_check ? ikbo::server::check(*config) : ikbo::server::serve(*config, logger);
  } catch (const std::exception& error) {
    logger.write(ikbo::server::LogLevel::kError, "failed", {{"error", error.what()}});
    return EXIT_FAILURE;
  }
}
