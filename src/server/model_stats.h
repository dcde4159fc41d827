// SPDX-License-Identifier: Apache-2.0
// Counts and sums of times of one model, and their JSON: /v2/models/M/stats, with the names of the
// statistics extension of the protocol. Lock-free; every method may be called by any thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "server/json_writer.h"
#include "server/request_record.h"

namespace ikbo::server {

class DurationSum {
 public:
  void add(std::chrono::steady_clock::duration time) {
    count_.fetch_add(1, std::memory_order_relaxed);
    nanoseconds_.fetch_add(std::chrono::nanoseconds(time).count(), std::memory_order_relaxed);
  }
  bool is_empty() const { return count_.load(std::memory_order_relaxed) == 0; }
  void write(std::string_view key, JsonWriter& json) const;  // "key":{"count":2,"ns":123}

 private:
  std::atomic<std::uint64_t> count_ = 0;
  std::atomic<std::int64_t> nanoseconds_ = 0;
};

class ModelStats {
 public:
  void observe_request(const RequestRecord& record);
  void observe_run(const RunSample& run);
  // The members of the model's object behind its name and version.
  void write(JsonWriter& json) const;

 private:
  struct RunTimes {
    DurationSum input;
    DurationSum infer;
    DurationSum output;

    void add(const RunSample& run);
    void write(JsonWriter& json) const;
  };

  std::atomic<std::int64_t> last_inference_ = 0;  // milliseconds since 1970
  std::atomic<std::int64_t> num_users_ = 0;
  std::atomic<std::int64_t> num_candidates_ = 0;
  std::atomic<std::uint64_t> num_runs_ = 0;
  DurationSum success_;
  DurationSum fail_;
  DurationSum queue_;
  RunTimes runs_;
  // By candidates: none, one, two, to 4, to 8 and so on.
  std::array<RunTimes, 33> by_candidates_;
};

}  // namespace ikbo::server
