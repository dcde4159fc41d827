// SPDX-License-Identifier: Apache-2.0
#include "server/batcher.h"

#include <algorithm>
#include <exception>
#include <future>
#include <optional>
#include <string>
#include <utility>

#include "server/split_request.h"
#include "server/thread_name.h"
#include "server/warm_up.h"

namespace ikbo::server {
namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

std::int64_t limit(std::int64_t wanted, std::int64_t range) {
  return wanted == 0 ? range : std::min(wanted, range);
}

BatcherOptions with_limits(BatcherOptions options, const runtime::Manifest& manifest) {
  options.max_users = limit(options.max_users, manifest.max_users);
  options.max_candidates = limit(options.max_candidates, manifest.max_candidates);
  return options;
}

}  // namespace

Batcher::Batcher(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options,
                 ModelMetrics& metrics)
    : model_(std::move(model)),
      options_(with_limits(options, model_->manifest())),
      costs_(SpecCosts::of_spec(model_->manifest().spec_json)),
      metrics_(metrics),
      admission_(options_.num_workers, options_.max_users, options_.max_candidates),
      queue_(model_->manifest(), admission_, options_.max_users, options_.max_candidates) {
  if (costs_.are_known()) {
    metrics_.has_costs = true;
  }
  try {
    std::vector<std::future<void>> warm;
    for (int i = 0; i < options_.num_workers; ++i) {
      std::promise<void> is_warm;
      warm.push_back(is_warm.get_future());
      workers_.emplace_back([this, i, is_warm = std::move(is_warm)]() mutable {
        const auto worker = static_cast<std::size_t>(i);
        std::optional<runtime::Session> session;
        name_this_thread("ikbo-worker");
        try {
          if (options_.on_worker_start) {
            options_.on_worker_start(i);
          }
          warm_up(session.emplace(model_), worker);
        } catch (...) {
          is_warm.set_exception(std::current_exception());
          return;
        }
        is_warm.set_value();
        work(*session, worker);
      });
    }
    for (std::future<void>& worker : warm) {
      worker.get();
    }
  } catch (...) {
    stop();
    throw;
  }
}

Batcher::~Batcher() { stop(); }

void Batcher::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void Batcher::warm_up(runtime::Session& session, std::size_t worker) {
  const runtime::Manifest& manifest = model_->manifest();
  run_made_up(session, manifest, 1, 1);
  if (worker == 0 && !options_.no_calibration) {
    measure_runs(session, manifest, options_.max_users, options_.max_candidates,
                 [this](std::int64_t num_users, std::int64_t num_candidates, Clock::duration time) {
                   const std::lock_guard lock(mutex_);
                   admission_.measured(num_users, num_candidates, time);
                 });
  }
}

void Batcher::check_size(const runtime::Request& request) const {
  const auto check = [this](const char* what, std::int64_t count, std::int64_t of_one_run) {
    if (count > of_one_run * options_.max_request_runs) {
      refuse(ErrorKind::kBadRequest, "model ", model_->manifest().model_name, ": a request's ",
             what, " must fill at most ", options_.max_request_runs,
             " runs (--max-request-runs) of ", of_one_run, "; got ", count);
    }
  };
  check("users", request.num_users, options_.max_users);
  check("candidates", request.num_candidates, options_.max_candidates);
}

void Batcher::require_room() const {
  if (queue_.num_requests() >= options_.max_queue) {
    refuse(ErrorKind::kQueueFull, "model ", model_->manifest().model_name,
           ": the queue must have room (--max-queue ", options_.max_queue,
           "); it is full, ask again later");
  }
}

void Batcher::require_time(const runtime::Request& request, const RequestTerms& terms,
                           Clock::time_point now) {
  if (terms.deadline == Clock::time_point::max()) {
    return;
  }
  // A request over the limits of a run takes as long as its runs, which share the workers.
  const std::int64_t max_users = std::max<std::int64_t>(options_.max_users, 1);
  const std::int64_t num_runs =
      std::max({std::int64_t{1}, (request.num_users + max_users - 1) / max_users,
                (request.num_candidates + options_.max_candidates - 1) / options_.max_candidates});
  const auto of_one = admission_.time(std::min(request.num_users, options_.max_users),
                                      std::min(request.num_candidates, options_.max_candidates));
  const auto needed = of_one * num_runs / std::min<std::int64_t>(num_runs, options_.num_workers);
  const auto begin =
      admission_.first_free(now) + queue_.time_before(terms.deadline) / options_.num_workers;
  // What is measured are single runs: the last of them is what may be too late.
  if (admission_.is_too_late(now, begin + (needed - of_one), of_one, terms.deadline)) {
    const auto us = [](Clock::duration time) {
      return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
    };
    refuse(ErrorKind::kDeadlineExceeded,
           "the request's deadline must leave time for the runs before its own, about ",
           us(begin - now), " us in the queue, and for its own, about ", us(needed),
           " us; it leaves ", us(terms.deadline - now), " us");
  }
}

void Batcher::submit(runtime::Request request, Done done, RequestTerms terms) {
  check_size(request);
  const auto now = Clock::now();
  Lock lock(mutex_);
  if (queue_.num_requests() >= options_.max_queue) {
    refuse_useless(lock);
  }
  require_room();
  require_time(request, terms, now);
  if (fits_one_run(request)) {
    queue_.add({std::move(request), std::move(done), std::move(terms), now});
  } else {
    lock.unlock();
    std::vector<QueueEntry> parts =
        split_request(model_, request, std::move(done), std::move(terms), now, options_.max_users,
                      options_.max_candidates);
    request = {};  // the parts hold what they need
    lock.lock();
    require_room();
    for (QueueEntry& part : parts) {
      queue_.add(std::move(part));
    }
    ++metrics_.split_requests;
  }
  metrics_.queued_requests = static_cast<std::int64_t>(queue_.num_requests());
  lock.unlock();
  changed_.notify_one();
}

// Calls back without the mutex, which `lock` holds before and after.
void Batcher::refuse_useless(Lock& lock) {
  std::vector<RefusedEntry> useless = queue_.take_useless(Clock::now());
  metrics_.queued_requests = static_cast<std::int64_t>(queue_.num_requests());
  if (useless.empty()) {
    return;
  }
  lock.unlock();
  for (RefusedEntry& refused : useless) {
    refused.entry.request = {};
    refused.entry.done(std::move(refused.error));
  }
  useless.clear();
  lock.lock();
}

void Batcher::work(runtime::Session& session, std::size_t worker) {
  for (;;) {
    // Of this turn alone: while the worker waits, it holds no request and no connection.
    std::vector<QueueEntry> entries = take(worker);
    if (entries.empty()) {
      return;
    }
    const auto begin = Clock::now();
    for (const QueueEntry& entry : entries) {
      metrics_.queue_seconds.observe(seconds(begin - entry.arrival));
      if (entry.terms.record != nullptr) {
        entry.terms.record->begin_run(begin);
      }
    }
    run(session, entries);
  }
}

std::vector<QueueEntry> Batcher::take(std::size_t worker) {
  Lock lock(mutex_);
  admission_.end(worker);
  NextRun next;
  for (;;) {
    changed_.wait(lock, [this] { return is_stopping_ || !queue_.is_empty(); });
    refuse_useless(lock);
    if (queue_.is_empty()) {
      if (is_stopping_) {
        return {};
      }
      continue;
    }
    const auto now = Clock::now();
    next = queue_.next_run(now);
    const auto wait = std::min<Clock::duration>(options_.max_wait, last_time_);
    const auto begin_by = std::min(std::min(next.first_arrival, last_end_) + wait, next.begin_by);
    if (is_stopping_ || next.is_full || next.size >= last_size_ || now >= begin_by) {
      break;
    }
    changed_.wait_until(lock, begin_by);
  }
  std::vector<QueueEntry> entries = queue_.take_front(next.size);
  admission_.begin(worker, next.num_users, next.num_candidates, Clock::now());
  metrics_.queued_requests = static_cast<std::int64_t>(queue_.num_requests());
  if (!queue_.is_empty()) {
    changed_.notify_one();
  }
  return entries;
}

}  // namespace ikbo::server
