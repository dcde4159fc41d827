// SPDX-License-Identifier: Apache-2.0
#include "server/request_record.h"

#include <algorithm>

namespace ikbo::server {

void RequestRecord::begin_run(Clock::time_point time) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  run_begin = run_begin == Clock::time_point{} ? time : std::min(run_begin, time);
}

void RequestRecord::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
}

void RequestRecord::end_run(const RunSample& sample, Clock::time_point time,
                            const std::vector<const RequestRecord*>& sampled) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) {
    return;
  }
  ++num_runs;
  run_end = std::max(run_end, time);
  run = sample.sizes;
  infer += sample.infer;
  run_mates.clear();
  num_unnamed_run_mates = 0;
  if (!span.is_sampled) {
    return;
  }
  for (const RequestRecord* mate : sampled) {
    if (mate == this) {
      continue;
    }
    if (run_mates.size() == kMaxRunMates) {
      ++num_unnamed_run_mates;
      continue;
    }
    run_mates.push_back({mate->span.trace_id, mate->span.span_id, true, ""});
  }
}

void note_run(const std::vector<RequestRecord*>& records, const RunSample& run) {
  const auto now = RequestRecord::Clock::now();
  std::vector<const RequestRecord*> sampled;
  for (const RequestRecord* record : records) {
    if (record != nullptr && record->span.is_sampled) {
      sampled.push_back(record);
    }
  }
  for (RequestRecord* record : records) {
    if (record != nullptr) {
      record->end_run(run, now, sampled);
    }
  }
}

}  // namespace ikbo::server
