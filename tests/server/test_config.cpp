// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "fixtures.h"
#include "server/config.h"

namespace ikbo::server {
namespace {

using testing::expect_contains;

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() {
    std::filesystem::create_directory(folder_);
    write("a.pt2", "");
    write("b # c.pt2", "");
  }
  ~ConfigTest() override {
    std::filesystem::remove_all(folder_);
    for (const auto& [name, value] : environment_) {
      unsetenv(name.c_str());
    }
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
  }
  void set(const std::string& name, const std::string& value) {
    environment_[name] = value;
    setenv(name.c_str(), value.c_str(), 1);
  }

  std::optional<Config> parse(std::vector<std::string> flags) {
    std::vector<const char*> argv = {"ikbo-server"};
    for (const std::string& flag : flags) {
      argv.push_back(flag.c_str());
    }
    exit_code_ = 0;
    ::testing::internal::CaptureStderr();
    ::testing::internal::CaptureStdout();
    auto config = parse_config(static_cast<int>(argv.size()), argv.data(), exit_code_);
    output_ = ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
    return config;
  }

  // The configuration file `text` is refused with an error that holds `part`.
  void expect_refused(const std::string& text, const std::string& part) {
    write("bad.conf", text);
    EXPECT_FALSE(parse({"--config", path("bad.conf")}).has_value()) << text;
    EXPECT_NE(exit_code_, 0);
    expect_contains(output_, part);
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("ikbo_config_" + std::to_string(getpid()));
  std::map<std::string, std::string> environment_;
  int exit_code_ = 0;
  std::string output_;
};

TEST_F(ConfigTest, ACacheOfUserStatesIsWantedByItsBytes) {
  const auto without = parse({"--model", path("a.pt2")});
  ASSERT_TRUE(without.has_value()) << output_;
  EXPECT_EQ(without->model.user_cache, nullptr);
  expect_contains(without->text, "user-cache-bytes = 0\nuser-cache-ttl-ms = 600000\n");

  write("cache.conf", "model = " + path("a.pt2") + "\nuser-cache-bytes = 1000000\n");
  set("IKBO_OPTION_USER_CACHE_TTL_MS", "5000");
  const auto with = parse({"--config", path("cache.conf")});
  ASSERT_TRUE(with.has_value()) << output_;
  EXPECT_NE(with->model.user_cache, nullptr);
  EXPECT_EQ(with->user_cache.max_bytes, 1'000'000U);
  EXPECT_EQ(with->user_cache.time_to_live, std::chrono::seconds(5));
  expect_contains(with->text, "user-cache-bytes = 1000000\nuser-cache-ttl-ms = 5000\n");

  EXPECT_FALSE(parse({"--model", path("a.pt2"), "--user-cache-bytes", "-1"}).has_value());
  expect_contains(output_, "--user-cache-bytes");
}

TEST_F(ConfigTest, ReadsAFile) {
  write("good.conf", "# models\n\nmodel = " + path("a.pt2") + "\r\n  model=" + path("b # c.pt2") +
                         "\nport = 81\nno-grpc = true\nmax-wait-us = 7\nlog-level = debug\n");
  const auto config = parse({"--config", path("good.conf")});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->packages.files, (std::vector<std::string>{path("a.pt2"), path("b # c.pt2")}));
  EXPECT_EQ(config->http.port, 81);
  EXPECT_TRUE(config->no_grpc);
  EXPECT_EQ(config->batcher.max_wait, std::chrono::microseconds(7));
  EXPECT_EQ(config->log_level, LogLevel::kDebug);
}

TEST_F(ConfigTest, CommandLineBeforeEnvironmentBeforeFile) {
  write("c.conf", "port = 1\ngrpc-port = 2\nworkers = 3\n");
  set("IKBO_OPTION_MODEL", path("a.pt2"));
  set("IKBO_OPTION_CONFIG", path("c.conf"));
  set("IKBO_OPTION_GRPC_PORT", "20");
  set("IKBO_OPTION_PORT", "10");
  set("IKBO_OPTION_NO_GRPC", "true");
  const auto config = parse({"--port", "100"});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->packages.files, std::vector<std::string>{path("a.pt2")});
  EXPECT_EQ(config->http.port, 100);
  EXPECT_EQ(config->grpc.port, 20);
  EXPECT_EQ(config->batcher.num_workers, 3);
  EXPECT_TRUE(config->no_grpc);
}

TEST_F(ConfigTest, UnknownKeysAndVariablesAreErrors) {
  const std::string model = "model = " + path("a.pt2") + "\n";
  expect_refused(model + "prot = 1\n", "bad.conf:2: a key must be a flag of --help");
  expect_refused(model + "prot = 1\n", "got 'prot'");
  expect_refused(model + "--port = 1\n", "got '--port'");
  expect_refused(model + "help = 1\n", "got 'help'");
  expect_refused(model + "config = x\n", "got 'config'");
  expect_refused(model + "check-config = true\n", "got 'check-config'");
  expect_refused(model + "\nport = 1\nport = 2\n", "bad.conf:4: a key must be given once");
  expect_refused("[server]\n", "bad.conf:1: a line must be 'key = value'");
  expect_refused("port =\n", "got 'port ='");
  expect_refused("= 7\n", "a line must be 'key = value'");
  expect_refused(model + "port = seven\n", "--port");
  expect_refused("port = 1\n", "--model or --model-repository is required");
  set("IKBO_OPTION_PROT", "1");
  EXPECT_FALSE(parse({"--model", path("a.pt2")}).has_value());
  expect_contains(output_, "IKBO_OPTION_PROT must stand for a flag");
}

TEST_F(ConfigTest, AMissingFileIsAnError) {
  EXPECT_FALSE(parse({"--model", path("a.pt2"), "--config", path("none.conf")}).has_value());
  expect_contains(output_, "none.conf");
  set("IKBO_OPTION_CONFIG", path("none.conf"));
  EXPECT_FALSE(parse({"--model", path("a.pt2")}).has_value());
  expect_contains(output_, "none.conf");
}

TEST_F(ConfigTest, TheTextIsAFileOfTheSameMeaning) {
  const auto first = parse({"--model", path("a.pt2"), "--model", path("b # c.pt2"), "--port", "81",
                            "--no-grpc", "--max-wait-us", "7"});
  ASSERT_TRUE(first.has_value()) << output_;
  write("again.conf", first->text);
  const auto second = parse({"--config", path("again.conf")});
  ASSERT_TRUE(second.has_value()) << output_ << first->text;
  EXPECT_EQ(second->text, first->text);
  EXPECT_EQ(second->packages.files, first->packages.files);
  EXPECT_EQ(second->http.port, 81);
  EXPECT_TRUE(second->no_grpc);
  expect_contains(second->text, "max-queue = 1024\n");
}

TEST_F(ConfigTest, RemoteAddressesNeedAFlag) {
  const auto refused = [](const std::string& host, bool allow_remote) {
    HttpOptions options;
    options.host = host;
    options.allow_remote = allow_remote;
    try {
      check_host(options);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  for (const char* host : {"127.0.0.1", "127.8.9.10", "::1"}) {
    EXPECT_EQ(refused(host, false), "");
  }
  for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1"}) {
    expect_contains(refused(host, false),
                    std::string("unless --allow-remote is given; got ") + host);
    EXPECT_EQ(refused(host, true), "");
  }
  expect_contains(refused("localhost", true), "--host: must be an IP address; got localhost");
}

TEST_F(ConfigTest, ReadsWhatIsToBeObserved) {
  auto config = parse({"--model", path("a.pt2")});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->log_format, LogFormat::kText);
  EXPECT_EQ(config->observer.slow_request.count(), 0);
  EXPECT_EQ(config->observer.otlp_endpoint, "");
  expect_contains(config->text, "log-level = info\nlog-format = text\n");
  expect_contains(config->text, "trace-sample-rate = 0.01\nservice-name = ikbo-server\n");
  config = parse({"--model", path("a.pt2"), "--log-format", "json", "--slow-request-ms", "20",
                  "--otlp-endpoint", "http://[::1]:4318", "--trace-sample-rate", "1"});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->log_format, LogFormat::kJson);
  EXPECT_EQ(config->observer.slow_request, std::chrono::milliseconds(20));
  EXPECT_EQ(config->observer.otlp_endpoint, "http://[::1]:4318");
  EXPECT_EQ(config->observer.trace_sample_rate, 1);
  expect_contains(config->text, "otlp-endpoint = http://[::1]:4318\n");
  const std::string model = "model = " + path("a.pt2") + "\n";
  expect_refused(model + "otlp-endpoint = https://a\n", "must be a URL http://host[:port][/path]");
  for (const std::string rate : {"1.5", "-0.1", "nan", "-NAN", "inf"}) {
    expect_refused(model + "trace-sample-rate = " + rate + "\n",
                   "--trace-sample-rate: must be from 0 to 1; got " + rate);
  }
  expect_refused(model + "log-format = xml\n", "--log-format");
  expect_refused(model + "slow-request-ms = -1\n", "--slow-request-ms");
}

TEST_F(ConfigTest, BoundsCudaGraphsAsItDoesRuns) {
  auto config = parse({"--model", path("a.pt2")});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->model.graphs.max_graphs, 128);
  EXPECT_EQ(config->model.graphs.max_bytes, 0u);
  expect_contains(config->text, "cuda-graphs = 128\ncuda-graph-memory = 0\n");
  config = parse({"--model", path("a.pt2"), "--cuda-graphs", "0", "--cuda-graph-memory", "1000",
                  "--max-batch-users", "3", "--max-batch-candidates", "70"});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->model.graphs.max_graphs, 0);
  EXPECT_EQ(config->model.graphs.max_bytes, 1000u);
  EXPECT_EQ(config->model.graphs.max_users, 3);
  EXPECT_EQ(config->model.graphs.max_candidates, 70);
  const std::string model = "model = " + path("a.pt2") + "\n";
  expect_refused(model + "cuda-graphs = -1\n", "--cuda-graphs");
  expect_refused(model + "cuda-graph-memory = x\n", "--cuda-graph-memory");
}

TEST_F(ConfigTest, ZerosAreSharesOfTheMachine) {
  const char* threads = std::getenv("OMP_NUM_THREADS");
  const std::string kept = threads == nullptr ? "" : threads;
  unsetenv("OMP_NUM_THREADS");
  auto config = parse({"--model", path("a.pt2"), "--workers", "1"});
  ASSERT_TRUE(config.has_value()) << output_;
  EXPECT_EQ(config->model.threads_per_run, config->host.cores);
  EXPECT_EQ(config->max_request_memory, config->host.memory_bytes / 4);
  EXPECT_GE(config->http.num_threads, 2);
  config = parse({"--model", path("a.pt2"), "--workers", "1000"});
  EXPECT_EQ(config->model.threads_per_run, 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  config = parse({"--model", path("a.pt2")});
  EXPECT_EQ(config->model.threads_per_run, 0);
  config = parse({"--model", path("a.pt2"), "--threads-per-run", "5", "--threads", "3",
                  "--max-request-memory", "1000"});
  EXPECT_EQ(config->model.threads_per_run, 5);
  EXPECT_EQ(config->http.num_threads, 3);
  EXPECT_EQ(config->max_request_memory, 1000u);
  kept.empty() ? unsetenv("OMP_NUM_THREADS") : setenv("OMP_NUM_THREADS", kept.c_str(), 1);
}

}  // namespace
}  // namespace ikbo::server
