// SPDX-License-Identifier: Apache-2.0
#include "server/model_stats.h"

#include <algorithm>
#include <bit>

namespace ikbo::server {

void DurationSum::write(std::string_view key, JsonWriter& json) const {
  json.key(key).begin_object();
  json.key("count").number(count_.load(std::memory_order_relaxed));
  json.key("ns").number(nanoseconds_.load(std::memory_order_relaxed));
  json.end_object();
}

void ModelStats::RunTimes::add(const RunSample& run) {
  input.add(run.input);
  infer.add(run.infer);
  output.add(run.output);
}

void ModelStats::RunTimes::write(JsonWriter& json) const {
  input.write("compute_input", json);
  infer.write("compute_infer", json);
  output.write("compute_output", json);
}

void ModelStats::observe_request(const RequestRecord& record) {
  const bool is_success = record.status == 200;
  (is_success ? success_ : fail_).add(record.answered - record.begin);
  if (record.run_begin != RequestRecord::Clock::time_point{}) {
    queue_.add(record.run_begin - record.queued);
  }
  if (is_success) {
    num_users_.fetch_add(record.users, std::memory_order_relaxed);
    num_candidates_.fetch_add(record.candidates, std::memory_order_relaxed);
    last_inference_ = std::chrono::duration_cast<std::chrono::milliseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  }
}

void ModelStats::observe_run(const RunSample& run) {
  num_runs_.fetch_add(1, std::memory_order_relaxed);
  runs_.add(run);
  const auto candidates =
      static_cast<std::uint64_t>(std::max<std::int64_t>(run.sizes.candidates, 0));
  const auto place =
      candidates == 0 ? 0 : static_cast<std::size_t>(std::bit_width(candidates - 1)) + 1;
  by_candidates_[std::min(place, by_candidates_.size() - 1)].add(run);
}

void ModelStats::write(JsonWriter& json) const {
  json.key("last_inference").number(last_inference_.load());
  json.key("inference_count").number(num_candidates_.load());
  json.key("execution_count").number(num_runs_.load());
  json.key("user_count").number(num_users_.load());
  json.key("inference_stats").begin_object();
  success_.write("success", json);
  fail_.write("fail", json);
  queue_.write("queue", json);
  runs_.write(json);
  json.end_object();
  json.key("batch_stats").begin_array();
  for (std::size_t place = 0; place < by_candidates_.size(); ++place) {
    if (by_candidates_[place].infer.is_empty()) {
      continue;
    }
    json.begin_object();
    json.key("batch_size").number(place == 0 ? 0 : std::int64_t{1} << (place - 1));
    by_candidates_[place].write(json);
    json.end_object();
  }
  json.end_array();
}

}  // namespace ikbo::server
