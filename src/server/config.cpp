// SPDX-License-Identifier: Apache-2.0
#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <utility>

#include "ikbo/error.h"
#include "server/config_file.h"
#include "server/gpu_flags.h"
#include "server/request_error.h"

namespace ikbo::server {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// Adds a flag in whole units of `Duration`, from `least` on.
template <typename Duration>
void add_time(CLI::App& app, const std::string& name, Duration& time, const std::string& text,
              std::int64_t least = 0) {
  app.add_option_function<std::int64_t>(
         name, [&time](const std::int64_t& count) { time = Duration(count); }, text)
      ->check(CLI::Range(least, kMaxInt32))
      ->default_str(std::to_string(time.count()));
}

void add_model_flags(CLI::App& app, Config& config) {
  app.add_option("--model", config.packages.files,
                 "Package (.pt2) to serve, under the name and version that it holds. Several: "
                 "repeat the flag; of one name, the last is served when no version is asked for")
      ->check(CLI::ExistingFile);
  app.add_option("--model-repository", config.packages.folders,
                 "Folder of which every package (*.pt2, at any depth) is served; of one name, the "
                 "latest version is served when none is asked for. Several: repeat the flag")
      ->check(CLI::ExistingDirectory);
  app.add_flag("--allow-repository-changes", config.allows_repository_changes,
               "Let clients list, load and unload models of --model and --model-repository");
  app.add_option("--ops-library", config.model.ops_library,
                 "Path of libikbo_ops.so; needed when a package calls ikbo operators")
      ->check(CLI::ExistingFile);
  app.add_option("--replicated", config.model.replicated_inputs,
                 "Inputs, by name, that clients send once for a user though the package, compiled "
                 "without users, wants them for each candidate; the server repeats them. To "
                 "compare a package made by ikbo.transform with")
      ->delimiter(',');
  app.add_option("--workers", config.batcher.num_workers, "Runs of one model at once")
      ->check(CLI::Range(1, runtime::kMaxThreads))
      ->capture_default_str();
  app.add_flag(
      "--pin-workers", config.pins_workers,
      "Give each worker of a model, with the threads of its runs, a share of the cores that "
      "this process may use, and no other; cores that runs leave over are for all other threads");
  app.add_option("--threads-per-run", config.model.threads_per_run,
                 "Threads inside one run; 0: a share of this process's cores for each worker")
      ->check(CLI::Range(0, runtime::kMaxThreads))
      ->capture_default_str();
}

void add_user_cache_flags(CLI::App& app, runtime::UserCacheOptions& cache) {
  app.add_option("--user-cache-bytes", cache.max_bytes,
                 "Keep what packages with a user stage computed of users for their next requests, "
                 "up to this many bytes for all models; 0: keep nothing")
      ->check(CLI::Range(std::size_t{0}, std::size_t{1} << 50))
      ->capture_default_str();
  add_time(app, "--user-cache-ttl-ms", cache.time_to_live,
           "Compute it anew after this long (ms), used or not; 0: no limit");
}

void add_batching_flags(CLI::App& app, Config& config) {
  app.add_option("--max-batch-users", config.batcher.max_users,
                 "Merge requests into one run up to this many users; 0, and at most: the package's "
                 "range")
      ->check(CLI::Range(std::int64_t{0}, kMaxInt32))
      ->capture_default_str();
  app.add_option("--max-batch-candidates", config.batcher.max_candidates,
                 "Merge requests into one run up to this many candidates; 0, and at most: the "
                 "package's range")
      ->check(CLI::Range(std::int64_t{0}, kMaxInt32))
      ->capture_default_str();
  app.add_option("--max-request-runs", config.batcher.max_request_runs,
                 "Split a larger request over this many runs at most; a larger one still gets "
                 "status 400")
      ->check(CLI::Range(std::int64_t{1}, kMaxInt32))
      ->capture_default_str();
  add_time(app, "--max-wait-us", config.batcher.max_wait,
           "After a merged run, wait this long (us) for as many requests again; a server without "
           "load never waits; 0: never wait");
  app.add_option("--max-queue", config.batcher.max_queue,
                 "Requests of one model that may wait; one more gets status 429")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 20))
      ->capture_default_str();
  app.add_flag("--no-calibration", config.batcher.no_calibration,
               "Do not run the model at several sizes first to learn what runs take");
}

void add_protocol_flags(CLI::App& app, Config& config) {
  app.add_option("--grpc-port", config.grpc.port, "Port for gRPC; 0: any free one (see the log)")
      ->capture_default_str();
  app.add_flag("--no-grpc", config.no_grpc, "Serve HTTP alone");
  app.add_option("--max-request-memory", config.max_request_memory,
                 "Bytes that all requests may hold at once; 0: a quarter of this process's memory")
      ->check(CLI::Range(std::size_t{0}, std::size_t{1} << 50))
      ->capture_default_str();
  app.add_option("--tls-cert", config.tls.certificate,
                 "PEM file: the server's certificate with its chain; turns TLS on, for both "
                 "protocols")
      ->check(CLI::ExistingFile);
  app.add_option("--tls-key", config.tls.key, "PEM file: the private key of the certificate")
      ->check(CLI::ExistingFile);
  app.add_option("--tls-client-ca", config.tls.client_ca,
                 "PEM file: clients must show a certificate that one of these authorities signed")
      ->check(CLI::ExistingFile);
  app.get_option("--tls-cert")->needs("--tls-key");
  app.get_option("--tls-key")->needs("--tls-cert");
  app.get_option("--tls-client-ca")->needs("--tls-cert");
}

void add_trust_flags(CLI::App& app, Config& config) {
  app.add_option("--model-dir", config.gate.folders,
                 "Folder below which packages must lie, links and '..' resolved; repeat the flag "
                 "for several; without it: anywhere")
      ->check(CLI::ExistingDirectory);
  app.add_flag("--require-digests", config.gate.trust.require_digests,
               "Refuse packages whose manifest lists no digests of their files");
  app.add_option("--trusted-key", config.gate.trust.keys,
                 "PEM file: an Ed25519 public key; packages must be signed by one of those given")
      ->check(CLI::ExistingFile);
  app.add_option("--infer-token-file", config.access.infer_tokens,
                 "File with one token a line; inference, metadata and metrics need one of them")
      ->check(CLI::ExistingFile);
  app.add_option("--admin-token-file", config.access.admin_tokens,
                 "File with one token a line; loading and unloading models needs one of them")
      ->check(CLI::ExistingFile);
}

void add_http_flags(CLI::App& app, HttpOptions& http) {
  app.add_option("--host", http.host, "Address to listen on; 0.0.0.0: all of this machine's")
      ->capture_default_str();
  app.add_flag("--allow-remote", http.allow_remote,
               "Let --host be an address that other machines reach");
  app.add_option("--port", http.port, "Port to listen on; 0: any free one (see the log)")
      ->capture_default_str();
  app.add_option("--threads", http.num_threads,
                 "Threads for connections, parsing and replies; 0: as many as suit the cores")
      ->check(CLI::Range(0, runtime::kMaxThreads))
      ->capture_default_str();
  app.add_option("--max-body-bytes", http.max_body_bytes,
                 "Largest request body; a larger one gets status 413")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 40))
      ->capture_default_str();
  app.add_option("--max-connections", http.max_connections,
                 "Open connections of HTTP, and as many of gRPC; one more gets status 503, and "
                 "over gRPC and TLS is closed")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 20))
      ->capture_default_str();
  add_time(app, "--idle-timeout-ms", http.idle_timeout,
           "Close a connection after this long (ms) without a request", 1);
  add_time(app, "--read-timeout-ms", http.read_timeout,
           "Close a connection that takes longer (ms) to send a request's head, or its body", 1);
  add_time(app, "--write-timeout-ms", http.write_timeout,
           "Close a connection that takes longer (ms) to receive a reply", 1);
  add_time(app, "--drain-timeout-ms", http.drain_timeout,
           "After SIGTERM or SIGINT, time (ms) to finish the requests under way");
}

// Adds a flag whose values are the keys of `values`; `value` has its default.
template <typename Value>
void add_choice(CLI::App& app, const std::string& name, const std::map<std::string, Value>& values,
                Value& value, const std::string& text) {
  std::string standard;
  for (const auto& [key, known] : values) {
    standard = known == value ? key : standard;
  }
  app.add_option_function<std::string>(
         name, [&value, values](const std::string& key) { value = values.at(key); }, text)
      ->check(CLI::IsMember(values))
      ->default_str(standard);
}

void add_observation_flags(CLI::App& app, Config& config) {
  add_choice<LogLevel>(app, "--log-level",
                       {{"debug", LogLevel::kDebug},
                        {"info", LogLevel::kInfo},
                        {"warning", LogLevel::kWarning},
                        {"error", LogLevel::kError}},
                       config.log_level, "Lines on stderr: debug, info, warning or error");
  add_choice<LogFormat>(app, "--log-format",
                        {{"text", LogFormat::kText}, {"json", LogFormat::kJson}}, config.log_format,
                        "text: key=value; json: an object per line");
  ObserverOptions& observer = config.observer;
  add_time(app, "--slow-request-ms", observer.slow_request,
           "Log infer requests that take this long (ms) or longer, and where their time went; 0: "
           "none");
  app.add_option("--otlp-endpoint", observer.otlp_endpoint,
                 "URL of an OpenTelemetry collector (OTLP over HTTP with JSON), http://host:4318: "
                 "turns tracing on")
      ->check([](const std::string& url) {
        try {
          parse_collector(url);
          return std::string();
        } catch (const Error& error) {
          return client_text(error);
        }
      });
  app.add_option("--trace-sample-rate", observer.trace_sample_rate,
                 "Share of requests to trace among those that come without a traceparent; with "
                 "one, its flag decides")
      ->check([](const std::string& text) {
        const double rate = std::strtod(text.c_str(), nullptr);
        return rate >= 0 && rate <= 1 ? "" : "must be from 0 to 1; got " + text;
      })
      ->capture_default_str();
  app.add_option("--service-name", observer.service_name, "service.name of the spans")
      ->capture_default_str();
}

// What a zero stands for.
void fill_in(Config& config) {
  config.host = find_host_resources();
  if (config.http.num_threads == 0) {
    constexpr int kCoresPerThread = 8;
    config.http.num_threads = std::clamp(config.host.cores / kCoresPerThread, 2, 16);
  }
  // Who sets OpenMP's own variable has decided.
  if (config.model.threads_per_run == 0 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    config.model.threads_per_run = std::max(1, config.host.cores / config.batcher.num_workers);
  }
  if (config.pins_workers) {
    const std::vector<CpuSet> all = find_cores();
    const int num_workers = config.batcher.num_workers;
    const int threads = config.model.threads_per_run;  // 0: who set OpenMP's variable knows
    CoreSplit cores =
        split_cores(all, threads > 0 ? num_workers * threads : static_cast<int>(all.size()));
    config.cpus_beside_workers = std::move(cores.others);
    config.batcher.on_worker_start = [cores = std::move(cores.workers), num_workers](int worker) {
      pin_thread(share_of_worker(cores, worker, num_workers));
    };
  }
  if (config.max_request_memory == 0) {
    config.max_request_memory = config.host.memory_bytes / 4;
  }
  if (config.user_cache.max_bytes > 0) {
    config.model.user_cache = runtime::make_user_cache(config.user_cache);
  }
}

}  // namespace

std::optional<Config> parse_config(int argc, const char* const* argv, int& exit_code) {
  Config config;
  CLI::App app(
      "Serves ikbo packages over HTTP and gRPC: Open Inference Protocol v2 with the binary tensor "
      "extension, /metrics for Prometheus. SIGTERM and SIGINT stop it gracefully.",
      "ikbo-server");
  app.set_version_flag("--version", IKBO_VERSION);
  add_model_flags(app, config);
  add_user_cache_flags(app, config.user_cache);
  add_gpu_flags(app, config.model.graphs);
  add_batching_flags(app, config);
  add_http_flags(app, config.http);
  add_protocol_flags(app, config);
  add_trust_flags(app, config);
  add_observation_flags(app, config);
  add_config_sources(app);
  app.add_flag("--check-config", config.is_check,
               "Check configuration, packages and certificates, print the flags in force as a "
               "configuration file, and end")
      ->configurable(false);
  try {
    refuse_unknown_variables(app);
    app.parse(argc, argv);
    if (config.packages.files.empty() && config.packages.folders.empty()) {
      throw CLI::RequiredError("--model or --model-repository");
    }
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error);
    return std::nullopt;
  }
  config.text = config_text(app);
  fill_in(config);
  config.grpc.host = config.http.host;
  config.grpc.max_message_bytes = config.http.max_body_bytes;
  config.grpc.max_connections = config.http.max_connections;
  config.grpc.max_calls = std::max<std::size_t>(2 * config.batcher.max_queue, 256);
  config.grpc.idle_timeout = config.http.idle_timeout;
  config.grpc.drain_timeout = config.http.drain_timeout;
  config.grpc.handshake_timeout = config.http.read_timeout;
  config.model.num_sessions = config.batcher.num_workers;
  config.model.graphs.max_users = config.batcher.max_users;
  config.model.graphs.max_candidates = config.batcher.max_candidates;
  return config;
}

}  // namespace ikbo::server
