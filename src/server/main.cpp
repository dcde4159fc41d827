// SPDX-License-Identifier: Apache-2.0
// ikbo-server: load the packages, listen, serve until told to stop.
#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "ikbo/error.h"
#include "ikbo/runtime/model.h"
#include "server/config.h"
#include "server/core.h"
#include "server/grpc_server.h"
#include "server/host_resources.h"
#include "server/http_server.h"
#include "server/log.h"
#include "server/package_gate.h"
#include "server/router.h"
#include "server/spec_cost.h"

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

// Holds SIGHUP back, from this thread and those that it starts, until it is let through: it would
// end a process that is not ready for it.
void hold_hangups(bool are_held) {
  sigset_t hangups;
  sigemptyset(&hangups);
  sigaddset(&hangups, SIGHUP);
  pthread_sigmask(are_held ? SIG_BLOCK : SIG_UNBLOCK, &hangups, nullptr);
}

// What parse_config was given, to be read again.
struct Arguments {
  int count;
  const char* const* values;
};

PackageSources read_sources(const Arguments& arguments) {
  int exit_code = EXIT_SUCCESS;
  const auto config = parse_config(arguments.count, arguments.values, exit_code);
  IKBO_CHECK(config.has_value(),
             "SIGHUP: the configuration must be free of errors; stderr has what is wrong with it");
  return config->packages;
}

void serve_until_stopped(const Config& config, const Arguments& arguments, const Logger& logger,
                         Core& core) {
  Router router(core);
  HttpServer http(config.http, config.tls, router, core, logger);
  hold_hangups(false);  // `http` takes them
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
  const auto on_stop = [&] {
    core.is_stopping = true;
    if (grpc.has_value()) {
      grpc->stop(config.http.drain_timeout);
    }
  };
  const auto on_hangup = [&] {
    core.repository->reread([arguments] { return read_sources(arguments); });
  };
  const bool is_http_drained = http.run(on_stop, on_hangup);
  const bool is_drained = is_http_drained && (!grpc.has_value() || grpc->wait_stopped());
  if (!is_drained) {
    logger.write(LogLevel::kError, "drain_timed_out",
                 {{"connections", core.metrics.connections.load()}});
    // A run cannot be interrupted, and it still uses what a return would destroy.
    std::_Exit(EXIT_FAILURE);
  }
}

// What can be known to be wrong before anything is loaded.
AccessTokens check_options(const Config& config, const Logger& logger) {
  check_host(config.http);
  IKBO_CHECK(config.no_grpc || config.http.port == 0 || config.http.port != config.grpc.port,
             "--port, --grpc-port: must differ; got ", config.http.port, " for both");
  if (config.tls.is_enabled() && !is_certificate_current(config.tls)) {
    logger.write(LogLevel::kWarning, "certificate_not_current",
                 {{"certificate", config.tls.certificate}});
  }
  check_gate(config.gate);
  IKBO_CHECK(!config.allows_repository_changes || config.access.infer_tokens.empty() ||
                 !config.access.admin_tokens.empty(),
             "--allow-repository-changes: must come with --admin-token-file when "
             "--infer-token-file is given, or whoever connects could change what is served");
  if (config.http.allow_remote && !config.tls.is_enabled() && config.access.is_any()) {
    logger.write(LogLevel::kWarning, "tokens_without_tls", {{"host", config.http.host}});
  }
  return AccessTokens(config.access);
}

OpenPackage opener(const Config& config) {
  return [gate = config.gate](const std::string& path) { return open_package(path, gate); };
}

int check(const Config& config, const Logger& logger) {
  check_options(config, logger);
  for (const PackageFile& file : find_packages(config.packages, opener(config))) {
    runtime::check_model_options(file.package, config.model);
    SpecCosts::of_spec(file.package.manifest().spec_json);
    warn_of_missing_digests(file.package, logger);
  }
  std::printf("# this process has %d cores and %zu bytes of memory\n%s", config.host.cores,
              config.host.memory_bytes, config.text.c_str());
  return EXIT_SUCCESS;
}

runtime::ModelOptions with_graph_log(runtime::ModelOptions options, const Logger& logger) {
  options.graphs.on_made = [&logger](const runtime::GraphReport& report) {
    if (report.error.empty()) {
      logger.write(LogLevel::kInfo, "cuda_graphs",
                   {{"model", report.model_name},
                    {"version", report.model_version},
                    {"graphs", report.num_graphs},
                    {"sizes", report.num_sizes},
                    {"bytes", report.bytes},
                    {"us", report.time.count()}});
    } else {
      logger.write(LogLevel::kWarning, "cuda_graphs_failed",
                   {{"model", report.model_name},
                    {"version", report.model_version},
                    {"error", report.error}});
    }
  };
  return options;
}

int serve(const Config& config, const Arguments& arguments, const Logger& logger) {
  hold_hangups(true);
  AccessTokens tokens = check_options(config, logger);
  if (!config.cpus_beside_workers.empty()) {
    pin_thread(config.cpus_beside_workers);  // before any other thread begins
  }
  logger.write(LogLevel::kInfo, "starting",
               {{"cores", config.host.cores},
                {"memory_bytes", config.host.memory_bytes},
                {"threads", config.http.num_threads},
                {"threads_per_run", config.model.threads_per_run},
                {"max_request_memory", config.max_request_memory}});
  Core core(config.max_request_memory, std::move(tokens));
  core.observer.emplace(config.observer, logger, core.metrics);
  core.repository.emplace(
      RepositoryOptions{.sources = config.packages,
                        .open = opener(config),
                        .load =
                            [&config, &logger](const runtime::Package& package) {
                              return runtime::Model::load(package,
                                                          with_graph_log(config.model, logger));
                            },
                        .batcher = config.batcher,
                        .allows_changes = config.allows_repository_changes},
      core.models, core.background, logger);
  core.repository->load_all();
  serve_until_stopped(config, arguments, logger, core);
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
  std::signal(SIGPIPE, SIG_IGN);  // whoever read the log may have gone
  try {
    return config->is_check ? ikbo::server::check(*config, logger)
                            : ikbo::server::serve(*config, {argc, argv}, logger);
  } catch (const std::exception& error) {
    logger.write(ikbo::server::LogLevel::kError, "failed", {{"error", error.what()}});
    return EXIT_FAILURE;
  }
}
