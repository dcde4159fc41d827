// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "fixtures.h"
#include "server/metrics.h"

namespace ikbo::server {
namespace {

using testing::expect_contains;

// The number behind `name` on the page.
double seconds_of(const std::string& page, const std::string& name) {
  const std::size_t at = page.find(name);
  return at == std::string::npos ? -1 : std::stod(page.substr(at + name.size()));
}

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

TEST(Metrics, PageTellsOfTheGpuWhereThereIsOne) {
  const std::string without = write_metrics({}, {});
  expect_contains(without, "# TYPE ikbo_gpu_runs_total counter\n");
  EXPECT_EQ(without.find("\nikbo_gpu_"), std::string::npos);
  const std::string text = write_metrics({}, {}, runtime::GpuCounts{5, 4, 3, 2, 1000});
  expect_contains(text, "ikbo_gpu_runs_total{launch=\"graph\"} 5\n");
  expect_contains(text, "ikbo_gpu_runs_total{launch=\"kernels\"} 4\n");
  expect_contains(text, "ikbo_gpu_allocations_total{memory=\"device\"} 3\n");
  expect_contains(text, "ikbo_gpu_allocations_total{memory=\"pinned\"} 2\n");
  expect_contains(text, "\nikbo_gpu_memory_bytes 1000\n");
}

TEST(Metrics, CountsTheWorkOfRunsByThePackagesSpec) {
  const std::string_view spec =
      R"({"version": 1, "variants": [], "rows": [{"flops_before": "100*B", "flops_after": "90*U",
          "bytes_before": "8*B + 16", "bytes_after": "4*U*B"}]})";
  const SpecCosts costs = SpecCosts::of_spec(spec);
  ModelMetrics model;
  model.has_costs = true;
  model.observe_run({{1, 2, 10}, {}, {}, {}}, costs);
  model.observe_run({{2, 3, 30}, {}, {}, {}}, costs);
  const std::string text = write_metrics({}, {{"m", "1", &model}});
  expect_contains(text, "ikbo_flops_total{model=\"m\",version=\"1\"} 450\n");
  expect_contains(text, "ikbo_replicated_flops_total{model=\"m\",version=\"1\"} 4000\n");
  expect_contains(text, "ikbo_bytes_total{model=\"m\",version=\"1\"} 440\n");
  expect_contains(text, "ikbo_replicated_bytes_total{model=\"m\",version=\"1\"} 352\n");
  expect_contains(text, "ikbo_batch_ratio_sum{model=\"m\",version=\"1\"} 15\n");
}

TEST(Metrics, TellOfTheUserCacheOfModelsThatHaveOne) {
  ModelMetrics metrics;
  const auto counts = std::make_shared<runtime::UserCacheCounts>();
  counts->hits = 3;
  counts->misses = 1;
  counts->evictions = 4;
  counts->expirations = 5;
  counts->bytes = 6'000'000;
  counts->entries = 7;
  const std::vector<LabelledMetrics> models = {{"with", "1", &metrics, nullptr, counts},
                                               {"without", "1", &metrics}};
  const std::string page = write_metrics({}, models);
  const std::string labels = "{model=\"with\",version=\"1\"} ";
  expect_contains(page, "# TYPE ikbo_user_cache_hits_total counter\n");
  expect_contains(page, "# TYPE ikbo_user_cache_bytes gauge\n");
  expect_contains(page, "\nikbo_user_cache_hits_total" + labels + "3\n");
  expect_contains(page, "\nikbo_user_cache_misses_total" + labels + "1\n");
  expect_contains(page, "\nikbo_user_cache_evictions_total" + labels + "4\n");
  expect_contains(page, "\nikbo_user_cache_expirations_total" + labels + "5\n");
  EXPECT_EQ(seconds_of(page, "\nikbo_user_cache_bytes" + labels), 6e6);
  expect_contains(page, "\nikbo_user_cache_entries" + labels + "7\n");
  EXPECT_EQ(page.find("ikbo_user_cache_hits_total{model=\"without\""), std::string::npos);
  expect_contains(encode_stats(models, "with", ""),
                  R"("user_cache":{"hit_count":3,"miss_count":1,"hit_rate":0.75,)"
                  R"("eviction_count":4,"expiration_count":5,"entry_count":7,"bytes":6000000})");
  EXPECT_EQ(encode_stats(models, "without", "").find("user_cache"), std::string::npos);
}

TEST(Metrics, OverheadIsWhatIsNeitherQueueNorModel) {
  using std::chrono::milliseconds;
  ModelMetrics model;
  const auto page = [&] { return write_metrics({}, {{"m", "1", &model}}); };
  const std::string labels = "{model=\"m\",version=\"1\"} ";
  // Its client sent for 4 s; it waited for 2 s and was 6.99 s in the model.
  const auto observe = [&](int num_runs) {
    RequestRecord record;
    record.read = RequestRecord::Clock::now() - milliseconds(9000);
    record.begin = record.read - milliseconds(4000);
    record.queued = record.read + milliseconds(1);
    for (int run = 0; run < num_runs; ++run) {
      record.begin_run(record.queued + milliseconds(2000));
      note_run({&record}, {{1, 1, 1}, {}, milliseconds(6990), {}});
    }
    model.finish(record, num_runs == 0 ? 500 : 200);
    model.observe_overhead(record);
  };
  for (const int num_runs : {0, 2, 1}) {
    expect_contains(page(), "ikbo_overhead_seconds_count" + labels + "0\n");
    observe(num_runs);
  }
  expect_contains(page(), "ikbo_overhead_seconds_count" + labels + "1\n");
  // 9 s less 2 s and 6.99 s, and the time of this test.
  EXPECT_GE(seconds_of(page(), "ikbo_overhead_seconds_sum" + labels), 0.009);
  EXPECT_LT(seconds_of(page(), "ikbo_overhead_seconds_sum" + labels), 1);
  expect_contains(page(), "ikbo_request_seconds_count" + labels + "3\n");
  EXPECT_GE(seconds_of(page(), "ikbo_request_seconds_sum" + labels), 39);
  expect_contains(page(), "ikbo_requests_total{model=\"m\",version=\"1\",code=\"500\"} 1\n");
}

TEST(RequestRecord, IsNotChangedOnceItIsClosed) {
  RequestRecord record;
  const auto begin = RequestRecord::Clock::now();
  record.begin_run(begin);
  record.close();
  record.begin_run(begin - std::chrono::seconds(1));
  note_run({&record}, {{1, 1, 10}, {}, std::chrono::milliseconds(3), {}});
  EXPECT_EQ(record.run_begin, begin);
  EXPECT_EQ(record.run_end, RequestRecord::Clock::time_point{});
  EXPECT_EQ(record.num_runs, 0);
}

TEST(RequestRecord, ARequestOfSeveralRunsHasTheFirstBeginAndTheLastEnd) {
  RequestRecord record;
  const auto first = RequestRecord::Clock::now();
  record.begin_run(first + std::chrono::seconds(1));
  record.begin_run(first);
  note_run({&record}, {{1, 1, 10}, {}, std::chrono::milliseconds(3), {}});
  const auto end = record.run_end;
  note_run({&record, nullptr}, {{2, 2, 20}, {}, std::chrono::milliseconds(4), {}});
  EXPECT_EQ(record.run_begin, first);
  EXPECT_GE(record.run_end, end);
  EXPECT_EQ(record.infer, std::chrono::milliseconds(7));
  EXPECT_EQ(record.run.candidates, 20);
}

TEST(ModelStats, GroupsRunsByTheNextPowerOfTwoOfTheirCandidates) {
  ModelStats stats;
  for (const std::int64_t candidates : {0, 1, 2, 3, 4, 5, 8, 9}) {
    stats.observe_run({{1, 1, candidates}, {}, std::chrono::nanoseconds(7), {}});
  }
  std::string text;
  JsonWriter json(text);
  json.begin_object();
  stats.write(json);
  json.end_object();
  for (const auto& [size, count] : {std::pair{0, 1}, {1, 1}, {2, 1}, {4, 2}, {8, 2}, {16, 1}}) {
    expect_contains(text, "{\"batch_size\":" + std::to_string(size) +
                              ",\"compute_input\":{\"count\":" + std::to_string(count) +
                              ",\"ns\":0},\"compute_infer\":{\"count\":" + std::to_string(count) +
                              ",\"ns\":" + std::to_string(7 * count));
  }
  expect_contains(text, "\"execution_count\":8,");
}

}  // namespace
}  // namespace ikbo::server
