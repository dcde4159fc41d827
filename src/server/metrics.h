// SPDX-License-Identifier: Apache-2.0
// Counters and histograms, and their Prometheus text. Updates are lock-free; every method may be
// called by any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/cuda_graphs.h"
#include "ikbo/runtime/user_cache.h"
#include "server/model_stats.h"
#include "server/request_error.h"
#include "server/request_record.h"
#include "server/spec_cost.h"

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

// What became of a trace's span.
enum class SpanOutcome : std::int8_t {
  kSent,
  kDropped,  // the queue of the exporter was full, or the process ended first
  kFailed,   // the collector could not be reached or did not take it
};
inline constexpr int kNumSpanOutcomes = 3;

// What one served model reports.
struct ModelMetrics {
  // After each run, of a package of those costs.
  void observe_run(const RunSample& run, const SpecCosts& costs);
  // When an infer request's reply is made; closes the record, with `status` and `answered`.
  void finish(RequestRecord& record, unsigned status);
  // When the first bytes of an answer are on their way. Of a request that was split it is not
  // known: its runs wait for others, and for each other.
  void observe_overhead(const RequestRecord& record);

  StatusCounts requests;
  Histogram request_seconds{Histogram::geometric(25e-6, 2, 18)};  // 25 us to 3.3 s
  // 5 us to 10 ms, four buckets for each doubling.
  Histogram overhead_seconds{Histogram::geometric(5e-6, 1.189207115, 45)};
  Histogram queue_seconds{Histogram::geometric(25e-6, 2, 18)};
  Histogram run_seconds{Histogram::geometric(25e-6, 2, 18)};
  Histogram batch_requests{Histogram::geometric(1, 2, 8)};
  Histogram batch_users{Histogram::geometric(1, 2, 10)};
  Histogram batch_candidates{Histogram::geometric(1, 2, 16)};
  Histogram batch_ratio{Histogram::geometric(1, 2, 14)};
  std::atomic<std::int64_t> queued_requests = 0;
  std::atomic<std::uint64_t> shared_users = 0;
  std::atomic<std::uint64_t> split_requests = 0;
  // Of the runs of packages whose costs are known.
  std::atomic<bool> has_costs = false;  // whether there was such a package
  std::atomic<double> flops = 0;
  std::atomic<double> bytes = 0;
  std::atomic<double> replicated_flops = 0;
  std::atomic<double> replicated_bytes = 0;
  ModelStats stats;
};

// What the process reports.
struct ServerMetrics {
  std::array<std::atomic<std::uint64_t>, kNumErrorKinds> errors{};
  std::atomic<std::int64_t> connections = 0;
  std::array<std::atomic<std::uint64_t>, kNumSpanOutcomes> spans{};

  void count(ErrorKind kind) { ++errors[static_cast<std::size_t>(kind)]; }
  void count(SpanOutcome outcome, std::size_t number) {
    spans[static_cast<std::size_t>(outcome)] += number;
  }
};

struct LabelledMetrics {
  std::string model;
  std::string version;
  const ModelMetrics* metrics = nullptr;
  std::shared_ptr<const void> owner = nullptr;  // of the metrics; null: the caller
  // Of the users whose states the model keeps; null: it keeps none.
  std::shared_ptr<const runtime::UserCacheCounts> user_cache = nullptr;
};

// The whole page, in the text exposition format 0.0.4; `gpu` of a process that uses one.
std::string write_metrics(const ServerMetrics& server, const std::vector<LabelledMetrics>& models,
                          const std::optional<runtime::GpuCounts>& gpu = runtime::gpu_counts());

// The statistics of the models of that name; an empty version stands for all of them.
std::string encode_stats(const std::vector<LabelledMetrics>& models, std::string_view name,
                         std::string_view version);

}  // namespace ikbo::server
