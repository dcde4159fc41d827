// SPDX-License-Identifier: Apache-2.0
// A worker's turn from the requests that it took to their outcomes.
#include <exception>
#include <string>
#include <utility>

#include "server/batcher.h"

namespace ikbo::server {
namespace {

// What a failed run means for its request.
ErrorKind kind_of(const std::exception& failure) {
  return dynamic_cast<const runtime::DeviceError*>(&failure) != nullptr
             ? ErrorKind::kModelUnavailable
             : ErrorKind::kExecutionFailed;
}

}  // namespace

std::vector<runtime::Response> Batcher::run_together(runtime::Session& session,
                                                     const std::vector<QueueEntry>& entries) {
  const runtime::Manifest& manifest = model_->manifest();
  std::vector<const runtime::Request*> requests;
  std::vector<RequestRecord*> records;
  requests.reserve(entries.size());
  records.reserve(entries.size());
  for (const QueueEntry& entry : entries) {
    requests.push_back(&entry.request);
    records.push_back(entry.terms.record.get());
  }
  const auto begin = Clock::now();
  const runtime::Batch batch = runtime::batch(manifest, requests);
  const auto merged = Clock::now();
  const std::vector<runtime::Tensor> outputs = session.run(batch.inputs);
  const auto run = Clock::now();
  std::vector<runtime::Response> responses = runtime::split(manifest, batch, outputs);
  const auto end = Clock::now();
  const RunSizes sizes{entries.size(), batch.inputs.num_users, batch.inputs.num_candidates};
  const RunSample sample{sizes, merged - begin, run - merged, end - run};
  metrics_.observe_run(sample, costs_);
  for (const runtime::Placement& place : batch.places) {
    metrics_.shared_users += place.shares_user ? 1 : 0;
  }
  note_run(records, sample);
  const std::lock_guard lock(mutex_);
  admission_.measured(sizes.users, sizes.candidates, end - begin);
  return responses;
}

void Batcher::run(runtime::Session& session, std::vector<QueueEntry>& entries) {
  const auto begin = Clock::now();
  std::vector<runtime::Response> responses;
  std::string error;
  ErrorKind kind{};
  try {
    responses = run_together(session, entries);
  } catch (const std::exception& exception) {
    error = client_text(exception);
    kind = kind_of(exception);
  }
  {
    const std::lock_guard lock(mutex_);
    last_size_ = entries.size();
    last_end_ = Clock::now();
    last_time_ = last_end_ - begin;
  }
  for (std::size_t i = 0; i < responses.size(); ++i) {
    entries[i].request = {};  // who has an answer holds no memory for its question
    entries[i].done(std::move(responses[i]));
  }
  if (!error.empty() && entries.size() == 1) {
    entries[0].request = {};
    entries[0].done(RequestError(kind, error));
  } else if (!error.empty()) {
    for (QueueEntry& entry : entries) {
      std::vector<QueueEntry> alone;
      alone.push_back(std::move(entry));
      run(session, alone);
    }
  }
}

}  // namespace ikbo::server
