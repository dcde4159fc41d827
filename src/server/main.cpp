// SPDX-License-Identifier: Apache-2.0
// ikbo-server: load the packages, listen, serve until told to stop.
#include <malloc.h>

#include <cstdlib>
#include <exception>
#include <string>

#include "ikbo/runtime/model.h"
#include "server/config.h"
#include "server/http_server.h"
#include "server/log.h"
#include "server/router.h"
#include "server/served_models.h"

namespace ikbo::server {
namespace {

// Runs allocate and free the same activations again and again. glibc's defaults hand them back to
// the kernel after each run, and the next one takes a page fault for every page of them.
void keep_freed_memory() {
  constexpr int kMebibyte = 1 << 20;
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 * kMebibyte);
  mallopt(M_TOP_PAD, 64 * kMebibyte);
  mallopt(M_TRIM_THRESHOLD, 1024 * kMebibyte);
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

int serve(const Config& config, const Logger& logger) {
  ServedModels models;
  load_models(config, logger, models);
  ServerMetrics metrics;
  Router router(models, metrics);
  HttpServer server(config.http, router, metrics, logger);
  logger.write(LogLevel::kInfo, "listening", {{"host", config.http.host}, {"port", server.port()}});
  if (!server.run()) {
    logger.write(LogLevel::kError, "drain_timed_out",
                 {{"connections", metrics.connections.load()}});
    // A run cannot be interrupted, and it still uses what a return would destroy.
    std::_Exit(EXIT_FAILURE);
  }
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
  const ikbo::server::Logger logger(config->log_level);
  ikbo::server::keep_freed_memory();
  try {
    return ikbo::server::serve(*config, logger);
  } catch (const std::exception& error) {
    logger.write(ikbo::server::LogLevel::kError, "failed", {{"error", error.what()}});
    return EXIT_FAILURE;
  }
}
