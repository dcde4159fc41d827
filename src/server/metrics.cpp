// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace ikbo::server {
namespace {

template <typename T>
std::string text_of(T value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

void write_sample(std::string_view name, std::string_view suffix, const std::string& labels,
                  const std::string& value, std::string& out) {
  out.append(name).append(suffix);
  if (!labels.empty()) {
    out.append("{").append(labels).append("}");
  }
  out.append(" ").append(value).append("\n");
}

void write_head(std::string_view name, std::string_view type, std::string_view help,
                std::string& out) {
  out.append("# HELP ").append(name).append(" ").append(help).append("\n");
  out.append("# TYPE ").append(name).append(" ").append(type).append("\n");
}

std::string label(std::string_view name, std::string_view value) {
  std::string text(name);
  text += "=\"";
  for (const char c : value) {
    if (c == '\n') {
      text += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') {
      text += '\\';
    }
    text += c;
  }
  return text + '"';
}

struct HistogramInfo {
  const Histogram ModelMetrics::* member;
  std::string_view name;
  std::string_view help;
};

constexpr HistogramInfo kHistograms[] = {
    {&ModelMetrics::queue_seconds, "ikbo_queue_seconds",
     "Time from a request's arrival in the queue to the start of its run."},
    {&ModelMetrics::run_seconds, "ikbo_run_seconds",
     "Time of one run: merging, the model, splitting."},
    {&ModelMetrics::overhead_seconds, "ikbo_overhead_seconds",
     "Time from a request's last byte to the first of its answer, without queue and model."},
    {&ModelMetrics::batch_requests, "ikbo_batch_requests", "Requests in one run."},
    {&ModelMetrics::batch_users, "ikbo_batch_users", "Users in one run."},
    {&ModelMetrics::batch_candidates, "ikbo_batch_candidates", "Candidates in one run."},
};

struct CounterInfo {
  const std::atomic<std::uint64_t> ModelMetrics::* member;
  std::string_view name;
  std::string_view help;
};

constexpr CounterInfo kCounters[] = {
    {&ModelMetrics::shared_users, "ikbo_shared_users_total",
     "Requests whose user's rows came with another request of their run."},
    {&ModelMetrics::split_requests, "ikbo_split_requests_total",
     "Requests that were split over several runs."},
};

}  // namespace

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), buckets_(bounds_.size() + 1) {}

void Histogram::observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  buckets_[static_cast<std::size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

void Histogram::write(std::string_view name, const std::string& labels, std::string& out) const {
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    count += buckets_[i].load(std::memory_order_relaxed);
    const std::string bound = i < bounds_.size() ? text_of(bounds_[i]) : "+Inf";
    write_sample(name, "_bucket", labels + "," + label("le", bound), text_of(count), out);
  }
  write_sample(name, "_sum", labels, text_of(sum_.load(std::memory_order_relaxed)), out);
  write_sample(name, "_count", labels, text_of(count), out);
}

std::vector<double> Histogram::geometric(double first, double factor, int count) {
  std::vector<double> bounds;
  for (int i = 0; i < count; ++i, first *= factor) {
    bounds.push_back(first);
  }
  return bounds;
}

void StatusCounts::count(unsigned status) {
  if (status >= kFirst && status < kFirst + counts_.size()) {
    counts_[status - kFirst].fetch_add(1, std::memory_order_relaxed);
  }
}

void StatusCounts::write(std::string_view name, const std::string& labels, std::string& out) const {
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const std::uint64_t count = counts_[i].load(std::memory_order_relaxed);
    if (count > 0) {
      write_sample(name, "", labels + "," + label("code", text_of(i + kFirst)), text_of(count),
                   out);
    }
  }
}

std::string write_metrics(const ServerMetrics& server, const std::vector<LabelledMetrics>& models) {
  std::string out;
  std::vector<std::string> labels;
  labels.reserve(models.size());
  for (const LabelledMetrics& model : models) {
    labels.push_back(label("model", model.model) + "," + label("version", model.version));
  }
  write_head("ikbo_requests_total", "counter", "Infer requests by model and HTTP status.", out);
  for (std::size_t i = 0; i < models.size(); ++i) {
    models[i].metrics->requests.write("ikbo_requests_total", labels[i], out);
  }
  for (const HistogramInfo& info : kHistograms) {
    write_head(info.name, "histogram", info.help, out);
    for (std::size_t i = 0; i < models.size(); ++i) {
      (models[i].metrics->*info.member).write(info.name, labels[i], out);
    }
  }
  for (const CounterInfo& info : kCounters) {
    write_head(info.name, "counter", info.help, out);
    for (std::size_t i = 0; i < models.size(); ++i) {
      write_sample(info.name, "", labels[i], text_of((models[i].metrics->*info.member).load()),
                   out);
    }
  }
  write_head("ikbo_queued_requests", "gauge", "Requests that wait for a run.", out);
  for (std::size_t i = 0; i < models.size(); ++i) {
    write_sample("ikbo_queued_requests", "", labels[i],
                 text_of(models[i].metrics->queued_requests.load()), out);
  }
  write_head("ikbo_errors_total", "counter", "Refused requests and dropped connections by kind.",
             out);
  for (int i = 0; i < kNumErrorKinds; ++i) {
    write_sample("ikbo_errors_total", "", label("kind", info_of(static_cast<ErrorKind>(i)).name),
                 text_of(server.errors[static_cast<std::size_t>(i)].load()), out);
  }
  write_head("ikbo_connections", "gauge", "Open client connections.", out);
  write_sample("ikbo_connections", "", "", text_of(server.connections.load()), out);
  return out;
}

}  // namespace ikbo::server
