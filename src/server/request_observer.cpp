// SPDX-License-Identifier: Apache-2.0
#include "server/request_observer.h"

#include <algorithm>
#include <array>
#include <utility>

namespace ikbo::server {
namespace {

using Clock = RequestRecord::Clock;

// More lines would slow down a server that is slow already.
constexpr int kMaxLinesPerSecond = 10;

std::int64_t microseconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::microseconds>(end - begin).count();
}

struct Step {
  std::string_view name;
  std::int64_t us = 0;
};

enum StepOf : std::int8_t { kRead, kDecode, kQueue, kRun, kWrite, kNumSteps };

// Where the time went. The last step that was reached goes on until the reply was made.
std::array<Step, kNumSteps> steps_of(const RequestRecord& record) {
  constexpr std::string_view kNames[kNumSteps] = {"read", "decode", "queue", "run", "write"};
  const Clock::time_point ends[kNumSteps] = {record.read, record.queued, record.run_begin,
                                             record.run_end, record.end};
  std::array<Step, kNumSteps> steps;
  Clock::time_point begin = record.begin;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Clock::time_point end = ends[i] != Clock::time_point{} ? ends[i] : record.answered;
    steps[i] = {kNames[i], microseconds(begin, end)};
    begin = end;
  }
  return steps;
}

}  // namespace

HttpUrl parse_collector(std::string_view url) {
  HttpUrl collector = parse_http_url(url, "--otlp-endpoint");
  if (collector.target == "/") {
    collector.target = "/v1/traces";
  }
  return collector;
}

RequestObserver::RequestObserver(const ObserverOptions& options, const Logger& logger,
                                 ServerMetrics& metrics)
    : options_(options), logger_(logger) {
  if (!options.otlp_endpoint.empty()) {
    ExporterOptions exporter;
    exporter.collector = parse_collector(options.otlp_endpoint);
    exporter.service_name = options.service_name;
    exporter_.emplace(std::move(exporter), metrics, logger);
  }
}

void RequestObserver::begin(RequestRecord& record, std::string_view traceparent,
                            std::string_view tracestate) const {
  if (auto parent = parse_trace_context(traceparent, tracestate)) {
    record.parent = parent->span_id;
    record.span = std::move(*parent);
    record.span.is_sampled = record.span.is_sampled && exporter_.has_value();
    record.span.span_id = make_span_id();
  } else if (exporter_.has_value() && random_share() < options_.trace_sample_rate) {
    record.span = {make_trace_id(), make_span_id(), true, ""};
  }
}

void RequestObserver::end(const std::shared_ptr<RequestRecord>& record) {
  if (record->answered == Clock::time_point{}) {
    return;  // no infer request
  }
  record->end = Clock::now();
  if (record->protocol == "grpc" && logger_.is_enabled(LogLevel::kDebug)) {
    logger_.write(LogLevel::kDebug, "request",
                  {{"method", "POST"},
                   {"target", "/inference.GRPCInferenceService/ModelInfer"},
                   {"status", record->status},
                   {"us", microseconds(record->begin, record->end)}});
  }
  if (options_.slow_request.count() > 0 && record->end - record->begin >= options_.slow_request) {
    log_slow(*record);
  }
  if (record->span.is_sampled) {
    exporter_->push(record);
  }
}

std::optional<std::int64_t> RequestObserver::take_line() {
  const auto now =
      std::chrono::duration_cast<std::chrono::seconds>(Clock::now().time_since_epoch());
  const std::lock_guard lock(mutex_);
  if (now.count() != second_) {
    second_ = now.count();
    num_lines_ = 0;
  }
  if (num_lines_ == kMaxLinesPerSecond) {
    ++num_left_out_;
    return std::nullopt;
  }
  ++num_lines_;
  return std::exchange(num_left_out_, 0);
}

void RequestObserver::log_slow(const RequestRecord& record) {
  const std::optional<std::int64_t> left_out = take_line();
  if (!left_out.has_value()) {
    return;
  }
  const auto steps = steps_of(record);
  const Step& longest = *std::max_element(steps.begin(), steps.end(),
                                          [](const Step& a, const Step& b) { return a.us < b.us; });
  const bool has_trace = record.span.trace_id != TraceId{};
  logger_.write(LogLevel::kWarning, "slow_request",
                {{"model", record.model},
                 {"version", record.version},
                 {"protocol", record.protocol},
                 {"id", record.id},
                 {"trace_id", has_trace ? hex_of(record.span.trace_id) : ""},
                 {"status", record.status},
                 {"users", record.users},
                 {"candidates", record.candidates},
                 {"us", microseconds(record.begin, record.end)},
                 {"mostly", longest.name},
                 {"read_us", steps[kRead].us},
                 {"decode_us", steps[kDecode].us},
                 {"queue_us", steps[kQueue].us},
                 {"run_us", steps[kRun].us},
                 {"write_us", steps[kWrite].us},
                 {"run_requests", record.run.requests},
                 {"run_users", record.run.users},
                 {"run_candidates", record.run.candidates},
                 {"left_out", *left_out}});
}

}  // namespace ikbo::server
