// SPDX-License-Identifier: Apache-2.0
// An open-loop load generator: requests are due at the times of a Poisson process, whether earlier
// ones were answered or not. Latency counts from the moment at which a request was due: time that
// it waits for a free connection, or for this process, is part of it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ikbo::load {

using Clock = std::chrono::steady_clock;

struct LoadOptions {
  std::string protocol = "http";  // or "grpc"
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;
  std::string model;
  std::string requests;        // path of the file that load_requests reads
  double rate = 0;             // requests a second
  double seconds = 0;          // that count
  double warm_up_seconds = 0;  // before them
  int connections = 16;
  std::uint64_t seed = 1;
  std::chrono::milliseconds timeout{10'000};  // of one request
  double tolerance = 0;                       // of an element of an answer, absolute
  bool ignores_answers = false;               // of a server that computes nothing
};

// A request as bytes, and the outputs that its answer must hold.
struct LoadRequest {
  std::string body;
  std::size_t json_size = 0;                   // HTTP: of the JSON before the binary tensors
  std::optional<std::vector<float>> expected;  // all outputs in order
};

// Reads {"requests": [{"body": FILE, "json_size": N, "expected": FILE}]}; files are relative to
// that one, an expected file holds float32 values and may be left out. Throws std::runtime_error.
std::vector<LoadRequest> load_requests(const LoadOptions& options);

// Times from the beginning to each arrival, `seconds` long.
std::vector<Clock::duration> poisson_arrivals(double rate, double seconds, std::uint64_t seed);

// When requests are due.
class Schedule {
 public:
  explicit Schedule(const LoadOptions& options);

  void begin() { begin_ = Clock::now(); }
  std::size_t size() const { return arrivals_.size(); }
  Clock::time_point due(std::size_t number) const { return begin_ + arrivals_[number]; }
  // Requests due before count as warm-up.
  Clock::time_point counts_from() const { return begin_ + warm_up_; }

 private:
  Clock::duration warm_up_;
  std::vector<Clock::duration> arrivals_;
  Clock::time_point begin_{};
};

// What became of the requests. Thread-safe.
class LoadRecord {
 public:
  LoadRecord(const LoadOptions& options, const Schedule& schedule);

  // An answer whose outputs are `outputs`, as bytes; nothing is said of them without `expected`.
  void answered(const LoadRequest& request, Clock::time_point due, Clock::time_point sent,
                Clock::time_point done, std::span<const std::byte> outputs);
  void failed(Clock::time_point due, std::string_view kind);

  // One JSON object.
  std::string summary() const;

 private:
  const LoadOptions& options_;
  const Schedule& schedule_;
  mutable std::mutex mutex_;
  // Guarded by mutex_, times in us:
  std::vector<double> latencies_;  // from due to done
  std::vector<double> lateness_;   // from due to sent
  std::map<std::string, std::uint64_t> errors_;
  double max_difference_ = 0;
  Clock::time_point last_done_{};
};

// Sends everything, and returns when all is answered or given up.
void run_http(const LoadOptions& options, const std::vector<LoadRequest>& requests,
              Schedule& schedule, LoadRecord& record);
void run_grpc(const LoadOptions& options, const std::vector<LoadRequest>& requests,
              Schedule& schedule, LoadRecord& record);

}  // namespace ikbo::load
