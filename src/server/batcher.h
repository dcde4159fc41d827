// SPDX-License-Identifier: Apache-2.0
// Merges the requests of one model into runs.
//
//   submit (any thread) -> queue -> worker threads: take a batch, run, split -> done callbacks
//
// The queue is ordered by when a request's time runs out: at its deadline, or kPatience after its
// arrival when that is sooner, so that requests without deadlines keep their order of arrival and
// none waits for ever. A request whose deadline has passed, or whose client has gone, is not run.
//
// A batch is the longest prefix of the queue whose sums of users and candidates stay within the
// limits. When to start it:
//   - at once, as long as requests come one by one: a worker that finds a request runs it;
//   - after a run that merged n requests their clients are about to ask again. A worker that finds
//     fewer than n waits for the others: until max_wait after the end of that run, or until as much
//     time as that run took has passed, whichever is shorter (waiting longer than a run takes does
//     not pay). No request waits longer than that either, or so long that it would miss its
//     deadline.
// A run of several requests that fails is repeated request by request, so that only the guilty one
// gets the error.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/model.h"
#include "server/metrics.h"
#include "server/request_error.h"

namespace ikbo::server {

struct BatcherOptions {
  std::int64_t max_users = 0;       // of one run; 0: the package's range
  std::int64_t max_candidates = 0;  // of one run; 0: the package's range
  std::chrono::microseconds max_wait{1000};
  std::size_t max_queue = 1024;  // waiting requests
  int num_workers = 1;           // runs at once
};

// When an answer is of no more use.
struct RequestTerms {
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  std::function<bool()> is_abandoned = {};  // asked by a worker before the run; may be empty
  std::shared_ptr<RequestRecord> record = nullptr;  // gets the times of the run; may be null
};

class Batcher {
 public:
  using Outcome = std::variant<runtime::Response, RequestError>;
  using Done = std::function<void(Outcome)>;

  // Starts the workers; each runs the model once on a made-up row, so that no client pays for
  // first-run work. Throws ikbo::Error when that run fails. `metrics` must outlive the batcher.
  Batcher(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options,
          ModelMetrics& metrics);
  // Finishes every request that was accepted.
  ~Batcher();
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  using Clock = std::chrono::steady_clock;

  // `request` has passed runtime::check_request. `done` is called once, by a worker or another
  // caller of `submit`; it must not throw. Throws RequestError kQueueFull, and then `done` is never
  // called. Thread-safe.
  void submit(runtime::Request request, Done done, RequestTerms terms = {});

 private:
  // The part of a request's waiting time that others with deadlines can take.
  static constexpr std::chrono::seconds kPatience{1};
  struct Entry {
    runtime::Request request;
    Done done;
    RequestTerms terms;
    Clock::time_point arrival;

    Clock::time_point due() const { return std::min(terms.deadline, arrival + kPatience); }
  };
  // The front of the queue that makes up the next run.
  struct Prefix {
    std::size_t size = 0;
    bool is_full = false;  // more would not fit
    Clock::time_point first_arrival = Clock::time_point::max();
    Clock::time_point first_deadline = Clock::time_point::max();
  };

  void warm_up(runtime::Session& session) const;
  void work(runtime::Session& session);
  std::vector<Entry> take();  // empty: stopping and nothing left
  // Takes what is not to be run out of the queue; with the mutex.
  std::vector<Entry> take_useless();
  static void refuse_useless(std::vector<Entry> entries);
  Prefix next_batch() const;
  void run(runtime::Session& session, std::vector<Entry>& entries);
  void note_end(std::size_t num_requests, Clock::duration time);
  std::vector<runtime::Response> run_together(runtime::Session& session,
                                              const std::vector<Entry>& entries);
  void stop();

  const std::shared_ptr<const runtime::Model> model_;
  BatcherOptions options_;
  ModelMetrics& metrics_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<Entry> queue_;
  std::size_t last_size_ = 0;  // requests in the run that ended last
  Clock::time_point last_end_{};
  Clock::duration last_time_{};  // that run took
  bool is_stopping_ = false;

  std::vector<std::thread> workers_;
};

}  // namespace ikbo::server
