// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>

#include "fixtures.h"
#include "runtime/executor.h"
#include "server/router.h"

namespace ikbo::server {
namespace {

using testing::body_of;
using testing::expect_contains;
using testing::manifest;

class RouterTest : public ::testing::Test {
 protected:
  RouterTest() {
    runtime::Manifest next = manifest();
    next.model_version = std::string("8");
    core_.models.replace("m", {start(manifest()), start(next)});
    runtime::Manifest plain = testing::plain_manifest();
    plain.model_name = "a/b c";
    core_.models.replace(plain.model_name, {start(plain)});
  }

  ServedModels::Handle start(const runtime::Manifest& added) {
    return core_.models.start(
        runtime::Model::with_executor(added, runtime::make_stub_executor(added)), {});
  }

  HttpReply ask(const std::string& method, const std::string& target,
                const std::string& json = "") {
    // As a connection does: the worker is left with nothing of the server's.
    std::promise<PendingReply> promise;
    router_.handle({method, target, body_of(json)},
                   [&](PendingReply pending) { promise.set_value(std::move(pending)); });
    const PendingReply pending = promise.get_future().get();
    is_quick_ = pending.is_quick;
    return pending.make();
  }

  void expect_status(unsigned status, const std::string& method, const std::string& target,
                     const std::string& part) {
    const HttpReply reply = ask(method, target);
    EXPECT_EQ(reply.status, status) << method << " " << target << "\n" << reply.text;
    expect_contains(reply.text, part);
  }

  Core core_{std::size_t{1} << 20};
  Router router_{core_};
  bool is_quick_ = false;  // the reply that was asked for last
};

TEST_F(RouterTest, AnswersHealthAndMetadata) {
  expect_status(200, "GET", "/v2", "\"extensions\":[\"binary_tensor_data\"]");
  expect_status(200, "GET", "/v2/", "ikbo-server");
  expect_status(200, "GET", "/v2/health/live", "{\"live\":true}");
  expect_status(200, "GET", "/v2/health/ready?x=1", "{\"ready\":true}");
  expect_status(200, "GET", "/v2/models/m", "\"versions\":[\"7\",\"8\"]");
  expect_status(200, "GET", "/v2/models/m/ready", "{\"name\":\"m\",\"ready\":true}");
  expect_status(200, "GET", "/v2/models/m/versions/7/ready", "\"ready\":true");
  expect_status(200, "GET", "/v2/models/a%2Fb%20c", "\"name\":\"a/b c\"");
  expect_status(200, "GET", "/metrics", "# TYPE ikbo_requests_total counter");
}

TEST_F(RouterTest, RefusesWhatIsNotThere) {
  expect_status(404, "GET", "/index.html", "there is nothing at /index.html");
  expect_status(404, "GET", "/v2/models", "there is nothing");
  expect_status(404, "GET", "/v2/models/m/config", "there is nothing");
  expect_status(404, "GET", "/v2/models/m/versions/7/infer/x", "there is nothing");
  expect_status(404, "GET", "/v2/models/other", "there is no model 'other' here");
  expect_status(404, "GET", "/v2/models/m/versions/9", "model m has no version '9' here");
  expect_status(400, "GET", "/v2/models/%4", "two hexadecimal digits");
  expect_status(400, "GET", "/v2/models/%zz", "two hexadecimal digits");
}

TEST_F(RouterTest, RefusesOtherMethods) {
  const HttpReply infer = ask("GET", "/v2/models/m/infer");
  EXPECT_EQ(infer.status, 405u);
  EXPECT_EQ(infer.headers, (decltype(infer.headers){{"Allow", "POST"}}));
  const HttpReply live = ask("POST", "/v2/health/live");
  EXPECT_EQ(live.status, 405u);
  EXPECT_EQ(live.headers, (decltype(live.headers){{"Allow", "GET, HEAD"}}));
}

TEST_F(RouterTest, InfersWithTheVersionAskedForOrTheLast) {
  for (const auto& [target, version] :
       {std::pair{"/v2/models/m/infer", "8"}, std::pair{"/v2/models/m/versions/7/infer", "7"}}) {
    const HttpReply reply = ask("POST", target, testing::valid_json());
    EXPECT_EQ(reply.status, 200u) << reply.text;
    expect_contains(reply.text, std::string("\"model_version\":\"") + version + "\"");
    // Candidate 0: 1 + 2 + 3, count 7, is_new 1, its user's 0.5 + 2; one more in each column.
    expect_contains(reply.text, "\"data\":[16.5,17.5,");
  }
}

TEST_F(RouterTest, SendsBinaryOutputsWithTheLengthOfTheJson) {
  const HttpReply reply =
      ask("POST", "/v2/models/m/infer",
          testing::replaced(testing::valid_json(), "{\"inputs\"",
                            "{\"parameters\": {\"binary_data_output\": true}, \"inputs\""));
  EXPECT_EQ(reply.content_type, "application/octet-stream");
  ASSERT_EQ(reply.headers.size(), 1u);
  EXPECT_EQ(reply.headers[0].first, "Inference-Header-Content-Length");
  EXPECT_EQ(reply.headers[0].second, std::to_string(reply.text.size()));
  ASSERT_EQ(reply.blobs.size(), 2u);
  EXPECT_EQ(testing::values_of<float>(reply.blobs[0].data, 8), (std::vector<float>{16.5, 17.5}));
}

TEST_F(RouterTest, LeavesToTheWorkerWhatIsQuick) {
  runtime::Manifest wide = testing::plain_manifest();
  wide.model_name = "wide";
  wide.max_candidates = 1024;
  core_.models.replace("wide", {start(wide)});
  const auto ask_for = [this](std::size_t candidates, const std::string& parameters) {
    std::string numbers = "0, 0";
    for (std::size_t i = 1; i < candidates; ++i) {
      numbers += ", 0, 0";
    }
    const HttpReply reply = ask("POST", "/v2/models/wide/infer",
                                R"({"inputs": [{"name": "x", "datatype": "FP32", "shape": [)" +
                                    std::to_string(candidates) + ", 2], \"data\": [" + numbers +
                                    "]}], \"parameters\": {" + parameters + "}}");
    EXPECT_EQ(reply.status, 200u) << reply.text;
    return is_quick_;
  };
  EXPECT_TRUE(ask_for(500, ""));
  EXPECT_FALSE(ask_for(1000, "")) << "a thousand numbers as text";
  EXPECT_TRUE(ask_for(1000, R"("binary_data_output": true)"));
  EXPECT_EQ(ask("POST", "/v2/models/wide/infer", "{").status, 400u);
  EXPECT_TRUE(is_quick_);
}

TEST_F(RouterTest, CountsRequestsByModelAndErrorsByKind) {
  ask("POST", "/v2/models/m/infer", testing::valid_json());
  ask("POST", "/v2/models/m/infer", "{");
  ask("POST", "/v2/models/other/infer", "{");
  const std::string text = ask("GET", "/metrics").text;
  expect_contains(text, "ikbo_requests_total{model=\"m\",version=\"8\",code=\"200\"} 1\n");
  expect_contains(text, "ikbo_requests_total{model=\"m\",version=\"8\",code=\"400\"} 1\n");
  expect_contains(text, "ikbo_batch_candidates_sum{model=\"m\",version=\"8\"} 2\n");
  expect_contains(text, "ikbo_errors_total{kind=\"bad_request\"} 1\n");
  expect_contains(text, "ikbo_errors_total{kind=\"not_found\"} 1\n");
}

TEST_F(RouterTest, RefusesChangesOfARepositoryThatIsFixed) {
  expect_status(403, "POST", "/v2/repository/index", "--allow-repository-changes");
  expect_status(403, "POST", "/v2/repository/models/m/load", "--allow-repository-changes");
  expect_status(403, "POST", "/v2/repository/models/m/unload", "--allow-repository-changes");
  expect_status(404, "POST", "/v2/repository/models/m", "there is nothing");
  expect_status(405, "GET", "/v2/repository/index", "method must be POST");
}

TEST_F(RouterTest, ReadsRequestsAboutTheRepository) {
  const Logger logger(LogLevel::kError);
  RepositoryOptions options;
  options.allows_changes = true;
  core_.repository.emplace(options, core_.models, core_.background, logger);
  expect_status(200, "GET", "/v2", R"("extensions":["binary_tensor_data","model_repository"])");
  expect_status(200, "POST", "/v2/repository/index", "[]");
  expect_status(404, "POST", "/v2/repository/models/m/load", "there is no package of model 'm'");
  const HttpReply parameters = ask("POST", "/v2/repository/models/m/load",
                                   R"({"parameters": {"file:1/model.pt2": "UEs="}})");
  EXPECT_EQ(parameters.status, 400u);
  expect_contains(parameters.text, "parameter 'file:1/model.pt2' is not supported");
  EXPECT_EQ(ask("POST", "/v2/repository/models/m/unload",
                R"({"parameters": {"unload_dependents": true}})")
                .status,
            404u);
}

TEST_F(RouterTest, IsNotReadyWhileAModelIsLoadedAgain) {
  core_.models.find("m", "7")->has_failed = true;
  expect_status(503, "GET", "/v2/health/ready", "{\"ready\":false}");
  expect_status(200, "GET", "/v2/health/live", "{\"live\":true}");
  expect_status(503, "GET", "/v2/models/m/versions/7/ready", "\"ready\":false");
  expect_status(200, "GET", "/v2/models/m/ready", "\"ready\":true");
  const HttpReply reply = ask("POST", "/v2/models/m/versions/7/infer", testing::valid_json());
  EXPECT_EQ(reply.status, 503u);
  EXPECT_EQ(reply.headers, (decltype(reply.headers){{"Retry-After", "1"}}));
  EXPECT_EQ(ask("POST", "/v2/models/m/infer", testing::valid_json()).status, 200u);
}

TEST_F(RouterTest, MeasuresWhatItAddsOnceTheAnswerIsSent) {
  const HttpReply refused = ask("POST", "/v2/models/m/infer", "{");
  EXPECT_FALSE(refused.on_sent);
  const HttpReply reply = ask("POST", "/v2/models/m/infer", testing::valid_json());
  const std::string count = "ikbo_overhead_seconds_count{model=\"m\",version=\"8\"} ";
  expect_contains(ask("GET", "/metrics").text, count + "0\n");
  ASSERT_TRUE(reply.on_sent);
  reply.on_sent();
  expect_contains(ask("GET", "/metrics").text, count + "1\n");
}

TEST_F(RouterTest, TellsTheStatisticsOfOneVersionOrAll) {
  ask("POST", "/v2/models/m/infer", testing::valid_json());
  ask("POST", "/v2/models/m/infer", "{");
  const std::string eight = ask("GET", "/v2/models/m/versions/8/stats").text;
  expect_contains(eight, "{\"model_stats\":[{\"name\":\"m\",\"version\":\"8\",");
  expect_contains(eight, "\"inference_count\":2,\"execution_count\":1,\"user_count\":1,");
  expect_contains(eight, "\"success\":{\"count\":1,");
  expect_contains(eight, "\"fail\":{\"count\":1,");
  expect_contains(eight, "\"batch_stats\":[{\"batch_size\":2,\"compute_input\":{\"count\":1,");
  const std::string both = ask("GET", "/v2/models/m/stats").text;
  expect_contains(both, "\"version\":\"7\",\"last_inference\":0,\"inference_count\":0,");
  expect_contains(both, "\"version\":\"8\",");
  expect_status(404, "GET", "/v2/models/m/versions/9/stats", "has no version '9'");
  expect_status(405, "POST", "/v2/models/m/stats", "method must be GET");
}

TEST_F(RouterTest, HasAStatusPageThatLoadsNothingFromElsewhere) {
  const HttpReply page = ask("GET", "/status");
  EXPECT_EQ(page.status, 200u);
  EXPECT_EQ(page.content_type, "text/html; charset=utf-8");
  ASSERT_EQ(page.headers.size(), 1u);
  EXPECT_EQ(page.headers[0].first, "Content-Security-Policy");
  expect_contains(page.headers[0].second, "default-src 'none'");
  EXPECT_EQ(page.text.find("<!doctype html>"), 0u);
  expect_contains(page.text, "</html>");
  EXPECT_EQ(page.text.find("https://"), std::string::npos);
  EXPECT_EQ(ask("GET", "/").text, page.text);
}

TEST_F(RouterTest, IsNotReadyWhileStopping) {
  core_.is_stopping = true;
  expect_status(503, "GET", "/v2/health/ready", "{\"ready\":false}");
  expect_status(503, "GET", "/v2/models/m/ready", "\"ready\":false");
  expect_status(200, "GET", "/v2/health/live", "{\"live\":true}");
  EXPECT_EQ(ask("POST", "/v2/models/m/infer", testing::valid_json()).status, 200u);
}

TEST_F(RouterTest, SaysWhatNeedsWhichToken) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("ikbo_router_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/infer") << "infer-infer-infer\n";
  std::ofstream(folder + "/admin") << "admin-admin-admin\n";
  Core core(1, AccessTokens({folder + "/infer", folder + "/admin"}));
  std::filesystem::remove_all(folder);
  const Router router(core);
  const auto is_open = [&](const std::string& target, const std::string& authorization) {
    try {
      router.authorize(target, authorization);
      return true;
    } catch (const RequestError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnauthenticated);
      return false;
    }
  };
  for (const char* target :
       {"/v2/health/live", "/v2/health/ready", "/v2/health/ready?x=1", "/v2/models/m/ready",
        "/v2/models/m/versions/7/ready", "/", "/status"}) {
    EXPECT_TRUE(is_open(target, "")) << target;
  }
  for (const char* target :
       {"/v2/models/m/infer", "/v2//models/m/infer", "/v2/%6dodels/m/infer", "/v2/models/m",
        "/v2/models/m/versions/7/infer", "/v2", "/other", "/metrics", "/v2/models/ready",
        "/v2/models/m/stats", "/v2/models/m/versions/7/stats", "/status/x",
        "/v2/models/m/infer/ready", "/v2/models/a%2Fready"}) {
    EXPECT_FALSE(is_open(target, "")) << target;
    EXPECT_TRUE(is_open(target, "Bearer infer-infer-infer")) << target;
    EXPECT_FALSE(is_open(target, "Bearer admin-admin-admin")) << target;
  }
  for (const char* target : {"/v2/repository/index", "/v2/repository/models/m/load",
                             "/v2/%72epository/models/m/unload"}) {
    EXPECT_FALSE(is_open(target, "")) << target;
    EXPECT_FALSE(is_open(target, "Bearer infer-infer-infer")) << target;
    EXPECT_TRUE(is_open(target, "Bearer admin-admin-admin")) << target;
  }
  const HttpReply reply = router.error_reply(RequestError(ErrorKind::kUnauthenticated, "no"));
  EXPECT_EQ(reply.status, 401u);
  EXPECT_EQ(reply.headers, (decltype(reply.headers){{"WWW-Authenticate", "Bearer"}}));
}

}  // namespace
}  // namespace ikbo::server
