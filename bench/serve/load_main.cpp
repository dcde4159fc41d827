// SPDX-License-Identifier: Apache-2.0
// ikbo-load: sends requests to a server and prints what became of them as one JSON object.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "load.h"

namespace {

using ikbo::load::LoadOptions;

void add_flags(CLI::App& app, LoadOptions& options) {
  app.add_option("--protocol", options.protocol, "http or grpc")
      ->check(CLI::IsMember({"http", "grpc"}))
      ->capture_default_str();
  app.add_option("--host", options.host, "The server's address")->capture_default_str();
  app.add_option("--port", options.port, "The server's port for that protocol")->required();
  app.add_option("--model", options.model, "Name in the path of HTTP requests")
      ->capture_default_str();
  app.add_option("--requests", options.requests,
                 "JSON: {\"requests\": [{\"body\": FILE, \"json_size\": N, \"expected\": FILE}]}, "
                 "sent in turn; a body of gRPC is a serialized ModelInferRequest")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--rate", options.rate, "Requests a second, at the times of a Poisson process")
      ->required()
      ->check(CLI::PositiveNumber);
  app.add_option("--seconds", options.seconds, "How long, after the warm-up")
      ->required()
      ->check(CLI::PositiveNumber);
  app.add_option("--warm-up-seconds", options.warm_up_seconds, "Requests that do not count")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--connections", options.connections, "Connections, opened before the first one")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of the times")->capture_default_str();
  app.add_option_function<std::int64_t>(
         "--timeout-ms",
         [&](const std::int64_t& count) { options.timeout = std::chrono::milliseconds(count); },
         "Of one request, from when it is sent")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{3'600'000}))
      ->default_str(std::to_string(options.timeout.count()));
  app.add_option("--tolerance", options.tolerance,
                 "Largest difference of an output's element from the expected one")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("--ignore-answers", options.ignores_answers, "Compare with no expected outputs");
}

}  // namespace

int main(int argc, char** argv) {
  LoadOptions options;
  CLI::App app("Open-loop load for a server of the Open Inference Protocol v2.", "ikbo-load");
  add_flags(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    const auto requests = ikbo::load::load_requests(options);
    ikbo::load::Schedule schedule(options);
    ikbo::load::LoadRecord record(options, schedule);
    (options.protocol == "http" ? ikbo::load::run_http : ikbo::load::run_grpc)(options, requests,
                                                                               schedule, record);
    std::printf("%s\n", record.summary().c_str());
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ikbo-load: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
