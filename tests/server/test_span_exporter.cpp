// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <optional>

#include "fixtures.h"
#include "ikbo/error.h"
#include "server/otlp_json.h"
#include "server/span_exporter.h"

namespace ikbo::server {
namespace {

using testing::expect_contains;

// Of a request that ran, so that it has three spans.
std::shared_ptr<RequestRecord> make_record() {
  auto record = std::make_shared<RequestRecord>();
  record->protocol = "http";
  record->span = {make_trace_id(), make_span_id(), true, ""};
  for (auto* time : {&record->read, &record->queued, &record->run_begin, &record->run_end,
                     &record->answered, &record->end}) {
    *time = record->begin;
  }
  return record;
}

std::uint64_t count_of(const ServerMetrics& metrics, SpanOutcome outcome) {
  return metrics.spans[static_cast<std::size_t>(outcome)];
}

TEST(SpanExporter, DropsWhatDoesNotFitAndNeverBlocks) {
  ServerMetrics metrics;
  const Logger logger(LogLevel::kError);
  ExporterOptions options;
  options.collector = parse_http_url("http://127.0.0.1:1", "url");  // nobody listens there
  options.max_queue = 2;
  options.interval = std::chrono::hours(1);
  {
    SpanExporter exporter(options, metrics, logger);
    for (int i = 0; i < 5; ++i) {
      exporter.push(make_record());
    }
    EXPECT_EQ(count_of(metrics, SpanOutcome::kDropped), 9u);
  }
  EXPECT_EQ(count_of(metrics, SpanOutcome::kDropped), 9u);
  EXPECT_EQ(count_of(metrics, SpanOutcome::kFailed), 6u);
  EXPECT_EQ(count_of(metrics, SpanOutcome::kSent), 0u);
}

TEST(SpanExporter, GivesUpAtTheEndWhenTheCollectorIsGone) {
  ServerMetrics metrics;
  const Logger logger(LogLevel::kError);
  ExporterOptions options;
  options.collector = parse_http_url("http://127.0.0.1:1", "url");
  options.max_batch = 1;
  options.first_retry = std::chrono::hours(1);
  {
    SpanExporter exporter(options, metrics, logger);
    for (int i = 0; i < 4; ++i) {
      exporter.push(make_record());
    }
  }
  EXPECT_EQ(count_of(metrics, SpanOutcome::kFailed), 3u);
  EXPECT_EQ(count_of(metrics, SpanOutcome::kDropped), 9u);
}

TEST(Spans, LinkAtMostSoManyRequestsOfTheRun) {
  std::vector<std::shared_ptr<RequestRecord>> owners;
  std::vector<RequestRecord*> records = {nullptr};
  for (std::size_t i = 0; i < RequestRecord::kMaxRunMates + 4; ++i) {
    owners.push_back(make_record());
    records.push_back(owners.back().get());
  }
  owners[1]->span.is_sampled = false;
  note_run(records, {{50, 60, 70}, {}, {}, {}});
  EXPECT_EQ(owners[0]->run.candidates, 70);
  EXPECT_EQ(owners[0]->run_mates.size(), RequestRecord::kMaxRunMates);
  EXPECT_EQ(owners[0]->num_unnamed_run_mates, 2u);
  EXPECT_EQ(owners[0]->run_mates[0].span_id, owners[2]->span.span_id);
  EXPECT_TRUE(owners[1]->run_mates.empty());
  expect_contains(encode_spans({owners[0]}, "s"), "\"droppedLinksCount\":2");
}

TEST(HttpUrl, HasHostPortAndTarget) {
  const auto parts = [](const char* text) {
    const HttpUrl url = parse_http_url(text, "--flag");
    return url.host + " " + url.port + " " + url.target;
  };
  EXPECT_EQ(parts("http://a"), "a 80 /");
  EXPECT_EQ(parts("http://a.b:4318"), "a.b 4318 /");
  EXPECT_EQ(parts("http://a/x/y?z"), "a 80 /x/y?z");
  EXPECT_EQ(parts("http://[::1]:4318/x"), "::1 4318 /x");
  EXPECT_EQ(parts("http://[::1]"), "::1 80 /");
  EXPECT_EQ(parse_http_url("http://[::1]:7", "x").authority(), "[::1]:7");
}

TEST(HttpUrl, RefusesWhatIsNone) {
  for (const char* text :
       {"", "a", "http://", "https://a", "http://a:", "http://a:x", "http://a:0", "http://a:65536",
        "http://:80", "http://a b", "http://[::1", "http://u@a", "http://a?b"}) {
    try {
      parse_http_url(text, "--flag");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      expect_contains(error.what(), "--flag: must be a URL http://host[:port][/path]; got '");
    }
  }
}

}  // namespace
}  // namespace ikbo::server
