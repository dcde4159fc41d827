// SPDX-License-Identifier: Apache-2.0
// What becomes of a request's record: its trace at the beginning; a line about a slow request and
// spans at the end.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "server/log.h"
#include "server/request_record.h"
#include "server/span_exporter.h"

namespace ikbo::server {

struct ObserverOptions {
  std::chrono::milliseconds slow_request{0};  // 0: none is slow
  std::string otlp_endpoint;                  // URL of a collector; empty: no spans
  double trace_sample_rate = 0.01;            // of requests that come without a trace
  std::string service_name = "ikbo-server";
};

// The collector of that URL; without a path, OTLP's own. Throws ikbo::Error.
HttpUrl parse_collector(std::string_view url);

// Thread-safe.
class RequestObserver {
 public:
  // Throws ikbo::Error for an endpoint that is no URL. Metrics and logger must outlive it.
  RequestObserver(const ObserverOptions& options, const Logger& logger, ServerMetrics& metrics);

  // At a request's beginning, with its headers; either may be empty.
  void begin(RequestRecord& record, std::string_view traceparent,
             std::string_view tracestate) const;
  // When its reply is sent, or cannot be. The record must not change any more.
  void end(const std::shared_ptr<RequestRecord>& record);

 private:
  void log_slow(const RequestRecord& record);
  // How many lines were left out since the last one; nothing when this one is to be left out, too.
  std::optional<std::int64_t> take_line();

  const ObserverOptions options_;
  const Logger& logger_;
  std::optional<SpanExporter> exporter_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::int64_t second_ = 0;  // that num_lines_ is about
  int num_lines_ = 0;
  std::int64_t num_left_out_ = 0;
};

}  // namespace ikbo::server
