// SPDX-License-Identifier: Apache-2.0
#include "server/span_exporter.h"

#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <exception>
#include <iterator>
#include <utility>

#include "server/otlp_json.h"
#include "server/thread_name.h"

namespace ikbo::server {
namespace {

constexpr std::size_t kMaxErrorText = 200;

bool is_success(const PostResult& result) { return result.status >= 200 && result.status < 300; }

// No reply, and the statuses after which OTLP allows another attempt.
bool is_worth_a_retry(const PostResult& result) {
  constexpr unsigned kStatuses[] = {0, 429, 502, 503, 504};
  return std::find(std::begin(kStatuses), std::end(kStatuses), result.status) !=
         std::end(kStatuses);
}

// partialSuccess.rejectedSpans of a collector's reply, a number or a string of one.
std::size_t rejected_spans(const std::string& reply) {
  simdjson::dom::parser parser;
  simdjson::dom::element document;
  simdjson::dom::element rejected;
  std::uint64_t number = 0;
  if (parser.parse(reply).get(document) != simdjson::SUCCESS ||
      document["partialSuccess"]["rejectedSpans"].get(rejected) != simdjson::SUCCESS ||
      rejected.get(number) == simdjson::SUCCESS) {
    return number;
  }
  std::string_view text;
  if (rejected.get(text) == simdjson::SUCCESS) {
    std::from_chars(text.data(), text.data() + text.size(), number);
  }
  return number;
}

std::size_t count_spans(const std::vector<std::shared_ptr<const RequestRecord>>& records) {
  std::size_t spans = 0;
  for (const auto& record : records) {
    spans += num_spans(*record);
  }
  return spans;
}

}  // namespace

SpanExporter::SpanExporter(ExporterOptions options, ServerMetrics& metrics, const Logger& logger)
    : options_(std::move(options)),
      metrics_(metrics),
      logger_(logger),
      thread_([this] { work(); }) {}

SpanExporter::~SpanExporter() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SpanExporter::push(std::shared_ptr<const RequestRecord> record) {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= options_.max_queue) {
      return metrics_.count(SpanOutcome::kDropped, num_spans(*record));
    }
    queue_.push_back(std::move(record));
    if (queue_.size() != options_.max_batch) {
      return;
    }
  }
  changed_.notify_one();
}

SpanExporter::Records SpanExporter::take() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, options_.interval,
                    [this] { return is_stopping_ || queue_.size() >= options_.max_batch; });
  const std::size_t size = std::min(queue_.size(), options_.max_batch);
  const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(size);
  Records records(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
  queue_.erase(queue_.begin(), end);
  return records;
}

bool SpanExporter::wait(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, time, [this] { return is_stopping_; });
}

void SpanExporter::work() {
  name_this_thread("ikbo-spans");
  for (;;) {
    const Records records = take();
    if (!records.empty()) {
      send(records);
    }
    if (is_over()) {
      return drop_queue();
    }
  }
}

bool SpanExporter::is_over() {
  const std::lock_guard lock(mutex_);
  return is_stopping_ && (queue_.empty() || is_failing_);
}

void SpanExporter::drop_queue() {
  const std::lock_guard lock(mutex_);
  metrics_.count(SpanOutcome::kDropped, count_spans({queue_.begin(), queue_.end()}));
  queue_.clear();
}

void SpanExporter::send(const Records& records) {
  PostResult result;
  try {
    result = post(encode_spans(records, options_.service_name));
  } catch (const std::exception& error) {  // no memory, say: requests go on
    result = {0, error.what()};
  }
  note(result, count_spans(records));
}

PostResult SpanExporter::post(const std::string& body) {
  std::chrono::milliseconds pause = options_.first_retry;
  for (int attempt = 1;; ++attempt, pause *= 2) {
    PostResult result = post_json(options_.collector, body, options_.timeout);
    if (!is_worth_a_retry(result) || attempt == options_.max_attempts || !wait(pause)) {
      return result;
    }
  }
}

void SpanExporter::note(const PostResult& result, std::size_t spans) {
  const bool has_failed = !is_success(result);
  const std::size_t failed = has_failed ? spans : std::min(rejected_spans(result.text), spans);
  metrics_.count(SpanOutcome::kFailed, failed);
  metrics_.count(SpanOutcome::kSent, spans - failed);
  if (has_failed && !is_failing_) {
    logger_.write(LogLevel::kWarning, "spans_not_sent",
                  {{"collector", options_.collector.authority()},
                   {"status", result.status},
                   {"error", std::string_view(result.text).substr(0, kMaxErrorText)}});
  }
  is_failing_ = has_failed;
}

}  // namespace ikbo::server
