// SPDX-License-Identifier: Apache-2.0
// Merges the requests of one model into runs.
//
//   submit (any thread) -> queue -> worker threads: take a run, run, split -> done callbacks
//
// What makes up a run is the queue's choice (request_queue.h). A request over the limits of a run
// is split over several and its answer joined. When to start a run:
//   - at once, as long as requests come one by one: a worker that finds a request runs it;
//   - after a run that merged n requests their clients are about to ask again. A worker that finds
//     fewer than n waits for the others: until max_wait after the end of that run, or until as much
//     time as that run took has passed, whichever is shorter (waiting longer than a run takes does
//     not pay). No request waits longer than that either, or so long that it would miss its
//     deadline.
// A run of several requests that fails is repeated request by request, so that only the guilty one
// gets the error.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/model.h"
#include "server/admission.h"
#include "server/metrics.h"
#include "server/request_error.h"
#include "server/request_queue.h"
#include "server/spec_cost.h"

namespace ikbo::server {

struct BatcherOptions {
  std::int64_t max_users = 0;          // of one run; 0: the package's range
  std::int64_t max_candidates = 0;     // of one run; 0: the package's range
  std::int64_t max_request_runs = 64;  // that a request's rows may fill
  std::chrono::microseconds max_wait{1000};
  std::size_t max_queue = 1024;  // waiting requests
  int num_workers = 1;           // runs at once
  bool no_calibration = false;   // learn what runs take from traffic alone
  // Called by each worker's thread, before anything else, with its number; may be empty.
  std::function<void(int)> on_worker_start = {};
};

class Batcher {
 public:
  using Outcome = InferOutcome;
  using Done = InferDone;
  using Clock = std::chrono::steady_clock;

  // Starts the workers; each runs the model on made-up rows, so that no client pays for first-run
  // work, and one of them measures what runs take. Throws ikbo::Error when such a run fails.
  // `metrics` must outlive the batcher.
  Batcher(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options,
          ModelMetrics& metrics);
  // Finishes every request that was accepted.
  ~Batcher();
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;

  // `request` has passed runtime::check_request. `done` is called once, by a worker or another
  // caller of `submit`; it must not throw. Throws RequestError kQueueFull, kBadRequest for a
  // request of too many runs, kDeadlineExceeded for a deadline that cannot be kept, kOutOfMemory
  // (see split_request), and then `done` is never called. Thread-safe.
  void submit(runtime::Request request, Done done, RequestTerms terms = {});

 private:
  using Lock = std::unique_lock<std::mutex>;

  void warm_up(runtime::Session& session, std::size_t worker);
  void work(runtime::Session& session, std::size_t worker);
  std::vector<QueueEntry> take(std::size_t worker);  // empty: stopping and nothing left
  void check_size(const runtime::Request& request) const;
  bool fits_one_run(const runtime::Request& request) const {
    return request.num_users <= options_.max_users &&
           request.num_candidates <= options_.max_candidates;
  }
  // Throw unless there is room for the request and time to answer it; with the mutex.
  void require_room() const;
  void require_time(const runtime::Request& request, const RequestTerms& terms,
                    Clock::time_point now);
  void refuse_useless(Lock& lock);
  void run(runtime::Session& session, std::vector<QueueEntry>& entries);
  std::vector<runtime::Response> run_together(runtime::Session& session,
                                              const std::vector<QueueEntry>& entries);
  void stop();

  const std::shared_ptr<const runtime::Model> model_;
  const BatcherOptions options_;
  const SpecCosts costs_;
  ModelMetrics& metrics_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  Admission admission_;
  RequestQueue queue_;
  std::size_t last_size_ = 0;  // entries in the run that ended last
  Clock::time_point last_end_{};
  Clock::duration last_time_{};  // that run took
  bool is_stopping_ = false;

  std::vector<std::thread> workers_;
};

}  // namespace ikbo::server
