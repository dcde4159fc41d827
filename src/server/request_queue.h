// SPDX-License-Identifier: Apache-2.0
// The requests of one model that wait for a run, and which of them make up the next one. Reads no
// clock and takes no lock: the batcher does.
//
// The queue is ordered by when a request's time runs out: at its deadline, or kPatience after its
// arrival when that is sooner, so that requests without deadlines keep their order of arrival and
// none waits for ever. A request whose deadline has passed or cannot be kept, or whose client has
// gone, is not run.
//
// A run is the longest prefix of the queue whose sums of users and candidates stay within the
// limits, and which is expected to end before the first deadline in it; but no longer than pays
// (RunCost::rows_of_next_run), as far as runs are known. Requests that share a user
// (runtime::have_same_user) count that user once.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <variant>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "server/admission.h"
#include "server/memory_budget.h"
#include "server/request_error.h"
#include "server/request_record.h"

namespace ikbo::server {

using InferOutcome = std::variant<runtime::Response, RequestError>;
using InferDone = std::function<void(InferOutcome)>;

struct RequestTerms {
  // When an answer is of no more use.
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  std::function<bool()> is_abandoned = {};  // asked by a worker before the run; may be empty
  // Where the memory that splitting and joining take is counted; nullptr: nowhere. Outlives the
  // answer.
  MemoryBudget* memory = nullptr;
  std::shared_ptr<RequestRecord> record = nullptr;  // gets the times of the run; may be null
};

// A request, or a part of one.
struct QueueEntry {
  using Clock = std::chrono::steady_clock;

  runtime::Request request;
  InferDone done;
  RequestTerms terms;
  Clock::time_point arrival;
  bool is_last_part = true;  // of its request, and the one that counts for it
  std::uint64_t user = 0;    // the same number: the same user; 0: nobody knows. Set by the queue

  Clock::time_point due() const { return std::min(terms.deadline, arrival + kPatience); }

 private:
  // The part of a request's waiting time that others with deadlines can take.
  static constexpr std::chrono::seconds kPatience{1};
};

// The front of the queue that makes up the next run.
struct NextRun {
  using Clock = std::chrono::steady_clock;

  std::size_t size = 0;  // entries
  bool is_full = false;  // more of what waits would not fit, or not pay
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  Clock::time_point first_arrival = Clock::time_point::max();
  Clock::time_point begin_by = Clock::time_point::max();  // or a deadline is missed
};

struct RefusedEntry {
  QueueEntry entry;
  RequestError error;
};

class RequestQueue {
 public:
  using Clock = std::chrono::steady_clock;

  // `manifest` and `admission` must outlive the queue.
  RequestQueue(const runtime::Manifest& manifest, Admission& admission, std::int64_t max_users,
               std::int64_t max_candidates)
      : manifest_(manifest),
        admission_(admission),
        max_users_(max_users),
        max_candidates_(max_candidates) {}

  bool is_empty() const { return entries_.empty(); }
  std::size_t num_requests() const { return num_requests_; }

  void add(QueueEntry entry);
  // What is not to be run, with why.
  std::vector<RefusedEntry> take_useless(Clock::time_point now);
  // The queue must not be empty.
  NextRun next_run(Clock::time_point now) const;
  std::vector<QueueEntry> take_front(std::size_t size);
  // How long the rows take that would be run before a request due then.
  Clock::duration time_before(Clock::time_point due) const;

 private:
  std::uint64_t user_of(const runtime::Request& request);
  double seconds_before(Clock::time_point due) const;  // the same as time_before

  const runtime::Manifest& manifest_;
  Admission& admission_;
  const std::int64_t max_users_;
  const std::int64_t max_candidates_;
  std::deque<QueueEntry> entries_;
  std::size_t num_requests_ = 0;  // whose last part is among the entries
  std::uint64_t num_users_ = 0;   // numbered so far
};

}  // namespace ikbo::server
