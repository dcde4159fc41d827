// SPDX-License-Identifier: Apache-2.0
// Counters and histograms, and their Prometheus text. Updates are lock-free; every method may be
// called by any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/request_error.h"

namespace ikbo::server {

// Counts of observations by upper bound.
class Histogram {
 public:
  // Ascending bounds; one more bucket takes everything above the last.
  explicit Histogram(std::vector<double> bounds);

  void observe(double value);
  // Appends the lines of one time series; `labels` without braces.
  void write(std::string_view name, const std::string& labels, std::string& out) const;

  // `count` bounds, each `factor` times the one before.
  static std::vector<double> geometric(double first, double factor, int count);

 private:
  std::vector<double> bounds_;
  std::vector<std::atomic<std::uint64_t>> buckets_;
  std::atomic<double> sum_ = 0;
};

// Requests by HTTP status.
class StatusCounts {
 public:
  void count(unsigned status);
  void write(std::string_view name, const std::string& labels, std::string& out) const;

 private:
  static constexpr unsigned kFirst = 200;
  std::array<std::atomic<std::uint64_t>, 400> counts_{};  // statuses 200 to 599
};

// What one served model reports.
struct ModelMetrics {
  StatusCounts requests;
  Histogram queue_seconds{Histogram::geometric(25e-6, 2, 18)};  // 25 us to 3.3 s
  Histogram run_seconds{Histogram::geometric(25e-6, 2, 18)};
  // 5 us to 10 ms, four buckets for each doubling.
  Histogram overhead_seconds{Histogram::geometric(5e-6, 1.189207115, 45)};
  Histogram batch_requests{Histogram::geometric(1, 2, 8)};
  Histogram batch_users{Histogram::geometric(1, 2, 10)};
  Histogram batch_candidates{Histogram::geometric(1, 2, 16)};
  std::atomic<std::int64_t> queued_requests = 0;
  std::atomic<std::uint64_t> shared_users = 0;
  std::atomic<std::uint64_t> split_requests = 0;
};

// What the process reports.
struct ServerMetrics {
  std::array<std::atomic<std::uint64_t>, kNumErrorKinds> errors{};
  std::atomic<std::int64_t> connections = 0;

  void count(ErrorKind kind) { ++errors[static_cast<std::size_t>(kind)]; }
};

struct LabelledMetrics {
  std::string model;
  std::string version;
  const ModelMetrics* metrics = nullptr;
  std::shared_ptr<const void> owner = nullptr;  // of the metrics; null: the caller
};

// The whole page, in the text exposition format 0.0.4.
std::string write_metrics(const ServerMetrics& server, const std::vector<LabelledMetrics>& models);

}  // namespace ikbo::server
