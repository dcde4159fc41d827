// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "fixtures.h"
#include "server/metrics.h"

namespace ikbo::server {
namespace {

using testing::expect_contains;

TEST(Histogram, CountsByUpperBoundInclusively) {
  Histogram histogram(Histogram::geometric(1, 2, 3));
  for (const double value : {0.5, 1.0, 1.5, 4.0, 100.0}) {
    histogram.observe(value);
  }
  std::string text;
  histogram.write("h", "a=\"b\"", text);
  EXPECT_EQ(text,
            "h_bucket{a=\"b\",le=\"1\"} 2\n"
            "h_bucket{a=\"b\",le=\"2\"} 3\n"
            "h_bucket{a=\"b\",le=\"4\"} 4\n"
            "h_bucket{a=\"b\",le=\"+Inf\"} 5\n"
            "h_sum{a=\"b\"} 107\n"
            "h_count{a=\"b\"} 5\n");
}

TEST(Metrics, PageNamesModelsCodesAndErrors) {
  ServerMetrics server;
  server.count(ErrorKind::kQueueFull);
  ModelMetrics model;
  model.requests.count(200);
  model.requests.count(200);
  model.requests.count(429);
  model.queued_requests = 3;
  const std::string text = write_metrics(server, {{"a\"b", "1", &model}});
  const std::string labels = "{model=\"a\\\"b\",version=\"1\"";
  expect_contains(text, "# TYPE ikbo_requests_total counter\n");
  expect_contains(text, "ikbo_requests_total" + labels + ",code=\"200\"} 2\n");
  expect_contains(text, "ikbo_requests_total" + labels + ",code=\"429\"} 1\n");
  expect_contains(text, "ikbo_run_seconds_count" + labels + "} 0\n");
  expect_contains(text, "ikbo_queued_requests" + labels + "} 3\n");
  expect_contains(text, "ikbo_errors_total{kind=\"queue_full\"} 1\n");
  expect_contains(text, "ikbo_errors_total{kind=\"timeout\"} 0\n");
  expect_contains(text, "\nikbo_connections 0\n");
}

}  // namespace
}  // namespace ikbo::server
