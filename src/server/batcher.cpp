// SPDX-License-Identifier: Apache-2.0
#include "server/batcher.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <future>
#include <iterator>
#include <string>
#include <utility>

#include "server/aligned_buffer.h"

namespace ikbo::server {
namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

// Zeros, or the least values allowed where zero is not.
AlignedBuffer row_of_least_values(const runtime::TensorSpec& spec) {
  const std::size_t bytes = spec.row_bytes();
  AlignedBuffer row = make_aligned_buffer(bytes);
  std::memset(row.get(), 0, bytes);
  if (spec.values.has_value() && spec.values->min > 0) {
    // The low bytes of a little-endian integer are the same integer, narrowed.
    const std::size_t size = size_of(spec.dtype);
    for (std::size_t at = 0; at < bytes; at += size) {
      std::memcpy(row.get() + at, &spec.values->min, size);
    }
  }
  return row;
}

std::int64_t limit(std::int64_t wanted, std::int64_t range) {
  return wanted == 0 ? range : std::min(wanted, range);
}

}  // namespace

Batcher::Batcher(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options,
                 ModelMetrics& metrics)
    : model_(std::move(model)), options_(options), metrics_(metrics) {
  options_.max_users = limit(options.max_users, model_->manifest().max_users);
  options_.max_candidates = limit(options.max_candidates, model_->manifest().max_candidates);
  try {
    std::vector<std::future<void>> warm;
    for (int i = 0; i < options_.num_workers; ++i) {
      std::promise<void> is_warm;
      warm.push_back(is_warm.get_future());
      workers_.emplace_back([this, is_warm = std::move(is_warm)]() mutable {
        runtime::Session session(model_);
        try {
          warm_up(session);
        } catch (...) {
          is_warm.set_exception(std::current_exception());
          return;
        }
        is_warm.set_value();
        work(session);
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

void Batcher::warm_up(runtime::Session& session) const {
  const runtime::Manifest& manifest = model_->manifest();
  runtime::RunInputs inputs;
  inputs.num_users = manifest.has_users() ? 1 : 0;
  inputs.num_candidates = 1;
  std::vector<AlignedBuffer> storage;
  for (const runtime::TensorSpec& spec : manifest.inputs) {
    storage.push_back(row_of_least_values(spec));
    runtime::Shape shape = spec.shape;
    shape[0] = 1;
    inputs.tensors.push_back(
        {spec.dtype, std::move(shape), storage.back().get(), spec.row_bytes()});
  }
  session.run(inputs);
}

void Batcher::submit(runtime::Request request, Done done, RequestTerms terms) {
  std::vector<Entry> useless;
  Entry entry{std::move(request), std::move(done), std::move(terms), Clock::now()};
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= options_.max_queue) {
      useless = take_useless();
    }
    if (queue_.size() >= options_.max_queue) {
      refuse(ErrorKind::kQueueFull, "model ", model_->manifest().model_name,
             ": the queue must have room (--max-queue ", options_.max_queue,
             "); it is full, ask again later");
    }
    const auto later = std::upper_bound(
        queue_.begin(), queue_.end(), entry.due(),
        [](Clock::time_point due, const Entry& queued) { return due < queued.due(); });
    queue_.insert(later, std::move(entry));
    metrics_.queued_requests = static_cast<std::int64_t>(queue_.size());
  }
  changed_.notify_one();
  refuse_useless(std::move(useless));
}

std::vector<Batcher::Entry> Batcher::take_useless() {
  const auto now = Clock::now();
  const auto first = std::stable_partition(queue_.begin(), queue_.end(), [now](const Entry& entry) {
    return entry.terms.deadline > now && !(entry.terms.is_abandoned && entry.terms.is_abandoned());
  });
  std::vector<Entry> useless(std::make_move_iterator(first), std::make_move_iterator(queue_.end()));
  queue_.erase(first, queue_.end());
  metrics_.queued_requests = static_cast<std::int64_t>(queue_.size());
  return useless;
}

void Batcher::refuse_useless(std::vector<Entry> entries) {
  for (Entry& entry : entries) {
    entry.request = {};
    const auto waited =
        std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - entry.arrival);
    if (entry.terms.deadline <= Clock::now()) {
      entry.done(
          RequestError(ErrorKind::kDeadlineExceeded,
                       "the request's deadline must be later than its run; it passed after " +
                           std::to_string(waited.count()) + " us in the queue"));
    } else {
      entry.done(RequestError(ErrorKind::kDisconnected, "the client has gone"));
    }
  }
}

void Batcher::work(runtime::Session& session) {
  for (;;) {
    // Of this turn alone: while the worker waits, it holds no request and no connection.
    std::vector<Entry> entries = take();
    if (entries.empty()) {
      return;
    }
    const auto begin = Clock::now();
    for (const Entry& entry : entries) {
      metrics_.queue_seconds.observe(seconds(begin - entry.arrival));
      if (entry.terms.record != nullptr) {
        entry.terms.record->begin_run(begin);
      }
    }
    run(session, entries);
  }
}

Batcher::Prefix Batcher::next_batch() const {
  Prefix prefix;
  std::int64_t users = 0;
  std::int64_t candidates = 0;
  for (const Entry& entry : queue_) {
    users += entry.request.num_users;
    candidates += entry.request.num_candidates;
    // A request over a limit that was set below the package's range runs alone.
    const bool fits = users <= options_.max_users && candidates <= options_.max_candidates;
    if (!fits && prefix.size > 0) {
      prefix.is_full = true;
      break;
    }
    ++prefix.size;
    prefix.first_arrival = std::min(prefix.first_arrival, entry.arrival);
    prefix.first_deadline = std::min(prefix.first_deadline, entry.terms.deadline);
  }
  return prefix;
}

std::vector<Batcher::Entry> Batcher::take() {
  std::unique_lock lock(mutex_);
  Prefix prefix;
  for (;;) {
    changed_.wait(lock, [this] { return is_stopping_ || !queue_.empty(); });
    if (std::vector<Entry> useless = take_useless(); !useless.empty()) {
      lock.unlock();
      refuse_useless(std::move(useless));
      lock.lock();
      continue;
    }
    if (queue_.empty()) {
      return {};
    }
    prefix = next_batch();
    const auto wait = std::min<Clock::duration>(options_.max_wait, last_time_);
    const auto begin_by = std::min(std::min(prefix.first_arrival, last_end_) + wait,
                                   prefix.first_deadline - last_time_);
    if (is_stopping_ || prefix.is_full || prefix.size >= last_size_ || Clock::now() >= begin_by) {
      break;
    }
    changed_.wait_until(lock, begin_by);
  }
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < prefix.size; ++i) {
    entries.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  metrics_.queued_requests = static_cast<std::int64_t>(queue_.size());
  if (!queue_.empty()) {
    changed_.notify_one();
  }
  return entries;
}

std::vector<runtime::Response> Batcher::run_together(runtime::Session& session,
                                                     const std::vector<Entry>& entries) {
  const runtime::Manifest& manifest = model_->manifest();
  std::vector<const runtime::Request*> requests;
  std::vector<RequestRecord*> records;
  requests.reserve(entries.size());
  records.reserve(entries.size());
  for (const Entry& entry : entries) {
    requests.push_back(&entry.request);
    records.push_back(entry.terms.record.get());
  }
  const auto begin = Clock::now();
  const runtime::Batch batch = runtime::batch(manifest, requests);
  const auto merged = Clock::now();
  const std::vector<runtime::Tensor> outputs = session.run(batch.inputs);
  const auto run = Clock::now();
  std::vector<runtime::Response> responses = runtime::split(manifest, batch, outputs);
  const RunSizes sizes{entries.size(), batch.inputs.num_users, batch.inputs.num_candidates};
  const RunSample sample{sizes, merged - begin, run - merged, Clock::now() - run};
  metrics_.observe_run(sample);
  note_run(records, sample);
  return responses;
}

void Batcher::note_end(std::size_t num_requests, Clock::duration time) {
  const std::lock_guard lock(mutex_);
  last_size_ = num_requests;
  last_end_ = Clock::now();
  last_time_ = time;
}

void Batcher::run(runtime::Session& session, std::vector<Entry>& entries) {
  const auto begin = Clock::now();
  std::vector<runtime::Response> responses;
  std::string error;
  try {
    responses = run_together(session, entries);
  } catch (const std::exception& exception) {
    error = client_text(exception);
  }
  note_end(entries.size(), Clock::now() - begin);
  for (std::size_t i = 0; i < responses.size(); ++i) {
    entries[i].request = {};  // who has an answer holds no memory for its question
    entries[i].done(std::move(responses[i]));
  }
  if (!error.empty() && entries.size() == 1) {
    entries[0].request = {};
    entries[0].done(RequestError(ErrorKind::kExecutionFailed, error));
  } else if (!error.empty()) {
    for (Entry& entry : entries) {
      std::vector<Entry> alone;
      alone.push_back(std::move(entry));
      run(session, alone);
    }
  }
}

}  // namespace ikbo::server
