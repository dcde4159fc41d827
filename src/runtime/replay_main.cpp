// SPDX-License-Identifier: Apache-2.0
// ikbo-replay: runs the replay cases of a package in a process without Python.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "ikbo/error.h"
#include "runtime/replay.h"

namespace {

using namespace ikbo::runtime;

struct Options {
  std::string model;
  PackageTrust trust;
  ModelOptions load;
  std::vector<std::string> cases;  // empty: all
};

constexpr const char* kDescription =
    "Runs the replay cases that a package stores and compares: each output against the stored one\n"
    "within the case's tolerances, and the kernels that ran against those that the compilation "
    "spec\n"
    "names. Prints a line per case and ends with \"N passed, N failed\".\n"
    "Exit status: 0 all cases passed, 1 a case failed, 2 the package could not be replayed.";

void describe(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("model", options.model, "The package (.pt2) that ikbo.package wrote")->required();
  app.add_option("--ops-library", options.load.ops_library,
                 "Path of libikbo_ops.so; needed when the package calls ikbo operators");
  app.add_option("--threads", options.load.threads_per_run,
                 "Threads within a run; 0: PyTorch's default")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--require-digests", options.trust.require_digests,
               "Refuse a package whose manifest lists no digests of its files");
  app.add_option("--trusted-key", options.trust.keys,
                 "PEM file of an Ed25519 public key; one of those given must have signed the "
                 "package; may be repeated");
  app.add_option("--case", options.cases,
                 "Replay the case of this id; may be repeated (default: all)");
}

std::vector<ReplayCase> choose_cases(const Package& package, const Options& options) {
  const std::vector<ReplayCase>& all = package.manifest().replay;
  IKBO_CHECK(!all.empty(), package.path(), ": stores no replay cases; package the model again");
  if (options.cases.empty()) {
    return all;
  }
  std::vector<ReplayCase> chosen;
  for (const std::string& id : options.cases) {
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const ReplayCase& replay) { return replay.id == id; });
    IKBO_CHECK(found != all.end(), package.path(), ": has no replay case \"", id, "\"");
    chosen.push_back(*found);
  }
  return chosen;
}

int run(const Options& options) {
  const Package package = Package::open(options.model, options.trust);
  if (package.manifest().files.empty()) {
    std::fprintf(stderr,
                 "ikbo-replay: %s: its manifest lists no digests of its files: package the model "
                 "again\n",
                 package.path().c_str());
  }
  const std::vector<ReplayCase> cases = choose_cases(package, options);
  Session session(Model::load(package, options.load));
  std::printf("%s: model %s, version %s, torch %s, %s\n", package.path().c_str(),
              package.manifest().model_name.c_str(), package.manifest().model_version.c_str(),
              package.manifest().torch_version.c_str(), package.manifest().device.c_str());
  std::printf("%-24s %6s %10s %8s  %-16s %11s %11s  %s\n", "case", "users", "candidates", "kernels",
              "worst output", "max error", "tolerance", "result");
  int failed = 0;
  for (const ReplayCase& replay_case : cases) {
    const ReplayResult result = replay(package, session, replay_case);
    std::printf("%-24s %6lld %10lld %8zu  %-16s %11.3g %11.3g  %s\n", replay_case.id.c_str(),
                static_cast<long long>(replay_case.num_users),
                static_cast<long long>(replay_case.num_candidates), replay_case.kernels.size(),
                result.worst_output.c_str(), result.worst.error, result.worst.allowed,
                result.passed() ? "passed" : "FAILED");
    for (const std::string& failure : result.failures) {
      std::printf("    %s\n", failure.c_str());
    }
    failed += result.passed() ? 0 : 1;
  }
  std::printf("%zu passed, %d failed\n", cases.size() - static_cast<std::size_t>(failed), failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(kDescription, "ikbo-replay");
  Options options;
  describe(app, options);
  try {
    app.parse(argc, argv);
    return run(options);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ikbo-replay: %s\n", error.what());
    return 2;
  }
}
