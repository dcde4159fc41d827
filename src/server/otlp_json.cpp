// SPDX-License-Identifier: Apache-2.0
#include "server/otlp_json.h"

#include <chrono>
#include <cstdint>
#include <utility>

#include "server/json_writer.h"
#include "server/prometheus_text.h"
#include "server/trace_context.h"

namespace ikbo::server {
namespace {

using Clock = RequestRecord::Clock;

constexpr Clock::time_point kNever{};
enum SpanKind : std::int8_t { kInternal = 1, kServer = 2 };
constexpr int kStatusError = 2;
// Bits of a span's or a link's flags.
constexpr unsigned kSampled = 0x1;
constexpr unsigned kKnowsRemote = 0x100;
constexpr unsigned kIsRemote = 0x200;

// What must be added to a time of the steady clock for nanoseconds since 1970.
std::int64_t wall_offset() {
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  const auto steady = Clock::now().time_since_epoch();
  return std::chrono::nanoseconds(wall).count() - std::chrono::nanoseconds(steady).count();
}

class SpanWriter {
 public:
  SpanWriter(const RequestRecord& record, std::int64_t offset, JsonWriter& json)
      : record_(record), offset_(offset), json_(json) {}

  void write() {
    write_request();
    if (record_.queued != kNever) {
      write_queue();
    }
    if (record_.run_begin != kNever) {
      write_run();
    }
  }

 private:
  void write_request() {
    const bool is_http = record_.protocol == "http";
    const bool has_parent = record_.parent != SpanId{};
    begin(record_.span.span_id, record_.parent,
          is_http ? "POST /v2/models/{model}/infer" : "inference.GRPCInferenceService/ModelInfer",
          kServer);
    json_.key("flags").number(kSampled | kKnowsRemote | (has_parent ? kIsRemote : 0));
    times(record_.begin, record_.end);
    json_.key("attributes").begin_array();
    if (is_http) {
      text("http.request.method", "POST");
      text("http.route", "/v2/models/{model}/infer");
      number("http.response.status_code", record_.status);
    } else {
      text("rpc.system", "grpc");
      text("rpc.service", "inference.GRPCInferenceService");
      text("rpc.method", "ModelInfer");
      number("ikbo.status", record_.status);
    }
    text("ikbo.model", record_.model);
    text("ikbo.version", record_.version);
    if (!record_.id.empty()) {
      text("ikbo.request_id", record_.id);
    }
    number("ikbo.users", record_.users);
    number("ikbo.candidates", record_.candidates);
    json_.end_array();
    if (record_.status >= 500) {
      json_.key("status").begin_object().key("code").number(kStatusError).end_object();
    }
    json_.end_object();
  }

  void write_queue() {
    begin(make_span_id(), record_.span.span_id, "queue", kInternal);
    json_.key("flags").number(kSampled | kKnowsRemote);
    times(record_.queued, record_.run_begin == kNever ? record_.answered : record_.run_begin);
    json_.end_object();
  }

  void write_run() {
    const bool has_failed = record_.run_end == kNever;
    begin(make_span_id(), record_.span.span_id, "run", kInternal);
    json_.key("flags").number(kSampled | kKnowsRemote);
    times(record_.run_begin, has_failed ? record_.answered : record_.run_end);
    json_.key("attributes").begin_array();
    if (!has_failed) {
      number("ikbo.run.requests", static_cast<std::int64_t>(record_.run.requests));
      number("ikbo.run.users", record_.run.users);
      number("ikbo.run.candidates", record_.run.candidates);
    }
    json_.end_array();
    json_.key("links").begin_array();
    for (const SpanContext& mate : record_.run_mates) {
      json_.begin_object();
      json_.key("traceId").string(hex_of(mate.trace_id));
      json_.key("spanId").string(hex_of(mate.span_id));
      json_.end_object();
    }
    json_.end_array();
    json_.key("droppedLinksCount").number(record_.num_unnamed_run_mates);
    if (has_failed) {
      json_.key("status").begin_object().key("code").number(kStatusError).end_object();
    }
    json_.end_object();
  }

  void begin(const SpanId& id, const SpanId& parent, std::string_view name, SpanKind kind) {
    json_.begin_object();
    json_.key("traceId").string(hex_of(record_.span.trace_id));
    json_.key("spanId").string(hex_of(id));
    if (parent != SpanId{}) {
      json_.key("parentSpanId").string(hex_of(parent));
    }
    if (!record_.span.state.empty()) {
      json_.key("traceState").string(record_.span.state);
    }
    json_.key("name").string(name);
    json_.key("kind").number(static_cast<int>(kind));
  }

  // OTLP has integers of 64 bits as strings.
  void times(Clock::time_point begin, Clock::time_point end) {
    json_.key("startTimeUnixNano").string(text_of(unix_time(begin)));
    json_.key("endTimeUnixNano").string(text_of(unix_time(end)));
  }

  std::int64_t unix_time(Clock::time_point time) const {
    return std::chrono::nanoseconds(time.time_since_epoch()).count() + offset_;
  }

  void text(std::string_view key, std::string_view value) {
    json_.begin_object().key("key").string(key);
    json_.key("value").begin_object().key("stringValue").string(value).end_object().end_object();
  }

  void number(std::string_view key, std::int64_t value) {
    json_.begin_object().key("key").string(key).key("value").begin_object();
    json_.key("intValue").string(text_of(value)).end_object().end_object();
  }

  const RequestRecord& record_;
  const std::int64_t offset_;
  JsonWriter& json_;
};

void write_resource(std::string_view service_name, JsonWriter& json) {
  json.key("resource").begin_object().key("attributes").begin_array();
  for (const auto& [key, value] :
       {std::pair<std::string_view, std::string_view>{"service.name", service_name},
        {"service.version", IKBO_VERSION}}) {
    json.begin_object().key("key").string(key);
    json.key("value").begin_object().key("stringValue").string(value).end_object().end_object();
  }
  json.end_array().end_object();
}

}  // namespace

std::size_t num_spans(const RequestRecord& record) {
  return 1 + (record.queued != kNever ? 1 : 0) + (record.run_begin != kNever ? 1 : 0);
}

std::string encode_spans(const std::vector<std::shared_ptr<const RequestRecord>>& records,
                         std::string_view service_name) {
  std::string body;
  JsonWriter json(body);
  json.begin_object().key("resourceSpans").begin_array().begin_object();
  write_resource(service_name, json);
  json.key("scopeSpans").begin_array().begin_object();
  json.key("scope").begin_object();
  json.key("name").string("ikbo-server").key("version").string(IKBO_VERSION).end_object();
  json.key("spans").begin_array();
  const std::int64_t offset = wall_offset();
  for (const auto& record : records) {
    SpanWriter(*record, offset, json).write();
  }
  json.end_array().end_object().end_array().end_object().end_array().end_object();
  return body;
}

}  // namespace ikbo::server
