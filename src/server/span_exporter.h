// SPDX-License-Identifier: Apache-2.0
// Sends the spans of sampled requests to a collector: OTLP over HTTP with JSON, from a thread of
// its own behind a bounded queue, so that no request ever waits for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/http_post.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/request_record.h"

namespace ikbo::server {

struct ExporterOptions {
  HttpUrl collector;
  std::string service_name;
  std::size_t max_queue = 4096;                 // requests; more are dropped
  std::size_t max_batch = 256;                  // requests of one post
  std::chrono::milliseconds interval{1000};     // between posts that are not full
  std::chrono::milliseconds timeout{5000};      // of a step of a post
  std::chrono::milliseconds first_retry{1000};  // doubled after each attempt
  int max_attempts = 5;                         // of one post
};

class SpanExporter {
 public:
  // Metrics and logger must outlive the exporter.
  SpanExporter(ExporterOptions options, ServerMetrics& metrics, const Logger& logger);
  // Tries once more to send what is queued.
  ~SpanExporter();
  SpanExporter(const SpanExporter&) = delete;
  SpanExporter& operator=(const SpanExporter&) = delete;

  // The record must not change any more. Thread-safe, and never waits for the collector.
  void push(std::shared_ptr<const RequestRecord> record);

 private:
  using Records = std::vector<std::shared_ptr<const RequestRecord>>;

  void work();
  Records take();  // after a while, or a full batch; may be empty
  void send(const Records& records);
  PostResult post(const std::string& body);  // with its retries
  // Whether the process goes on.
  bool wait(std::chrono::milliseconds time);
  void note(const PostResult& result, std::size_t spans);
  bool is_over();
  void drop_queue();

  const ExporterOptions options_;
  ServerMetrics& metrics_;
  const Logger& logger_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<std::shared_ptr<const RequestRecord>> queue_;
  bool is_stopping_ = false;

  bool is_failing_ = false;  // the last post failed: said once in the log
  std::thread thread_;       // last: it uses the others
};

}  // namespace ikbo::server
