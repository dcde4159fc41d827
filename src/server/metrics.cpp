// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/prometheus_text.h"

namespace ikbo::server {
namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

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

void ModelMetrics::observe_run(const RunSample& run, const SpecCosts& costs) {
  const RunSizes& sizes = run.sizes;
  run_seconds.observe(seconds(run.input + run.infer + run.output));
  batch_requests.observe(static_cast<double>(sizes.requests));
  batch_users.observe(static_cast<double>(sizes.users));
  batch_candidates.observe(static_cast<double>(sizes.candidates));
  if (sizes.users > 0) {
    batch_ratio.observe(static_cast<double>(sizes.candidates) / static_cast<double>(sizes.users));
  }
  if (costs.are_known()) {
    const Cost done = costs.at(sizes.users, sizes.candidates);
    const Cost replicated = costs.replicated_at(sizes.users, sizes.candidates);
    flops += done.flops;
    bytes += done.bytes;
    replicated_flops += replicated.flops;
    replicated_bytes += replicated.bytes;
  }
  stats.observe_run(run);
}

void ModelMetrics::finish(RequestRecord& record, unsigned status) {
  record.close();
  record.status = status;
  record.answered = RequestRecord::Clock::now();
  requests.count(status);
  request_seconds.observe(seconds(record.answered - record.begin));
  stats.observe_request(record);
}

void ModelMetrics::observe_overhead(const RequestRecord& record) {
  if (record.num_runs == 1) {
    const auto queue = record.run_begin - record.queued;
    const auto time = RequestRecord::Clock::now() - record.read;
    overhead_seconds.observe(seconds(time - queue - record.infer));
  }
}

}  // namespace ikbo::server
