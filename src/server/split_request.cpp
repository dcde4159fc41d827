// SPDX-License-Identifier: Apache-2.0
#include "server/split_request.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>
#include <variant>

#include "ikbo/runtime/cut.h"

namespace ikbo::server {
namespace {

using runtime::Response;

// Storage of an output with the memory that it was counted as.
struct CountedStorage {
  std::shared_ptr<const void> storage;
  std::shared_ptr<MemoryBudget::Lease> lease;
};

// What the parts of one request have in common. Thread-safe.
class Joiner {
 public:
  Joiner(std::shared_ptr<const runtime::Model> model, const runtime::Request& request,
         InferDone done, std::function<bool()> is_abandoned, MemoryBudget::Lease lease)
      : model_(std::move(model)),
        joined_(model_->manifest(), request.num_users, request.num_candidates),
        done_(std::move(done)),
        is_abandoned_(std::move(is_abandoned)),
        lease_(std::move(lease)) {}

  // The places of the parts; before any of them is queued.
  void expect(runtime::CutRequest cut) {
    cut_ = std::move(cut);
    num_missing_ = cut_.parts.size();
  }

  void finish(std::size_t part, InferOutcome outcome) {
    if (std::holds_alternative<RequestError>(outcome)) {
      return end(std::move(outcome));
    }
    joined_.add(cut_, part, std::get<Response>(outcome));
    if (--num_missing_ == 0) {
      Response whole = joined_.take();
      const auto lease = std::make_shared<MemoryBudget::Lease>(std::move(lease_));
      for (runtime::Tensor& output : whole.outputs) {
        output.owner = std::make_shared<CountedStorage>(CountedStorage{output.owner, lease});
      }
      end(std::move(whole));
    }
  }

  // With the lock: whoever asked may be gone as soon as it has its answer.
  bool is_abandoned() const {
    const std::lock_guard lock(mutex_);
    return has_ended_ || (is_abandoned_ && is_abandoned_());
  }

 private:
  void end(InferOutcome outcome) {
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(has_ended_, true)) {
        return;
      }
      // The budget may end soon after the answer.
      const MemoryBudget::Lease returned = std::move(lease_);
    }
    done_(std::move(outcome));
  }

  const std::shared_ptr<const runtime::Model> model_;
  runtime::CutRequest cut_;
  runtime::JoinedResponse joined_;
  const InferDone done_;
  const std::function<bool()> is_abandoned_;
  MemoryBudget::Lease lease_;  // until the outputs have it
  std::atomic<std::size_t> num_missing_ = 0;
  mutable std::mutex mutex_;
  bool has_ended_ = false;  // guarded by mutex_
};

}  // namespace

std::vector<QueueEntry> split_request(const std::shared_ptr<const runtime::Model>& model,
                                      const runtime::Request& request, InferDone done,
                                      RequestTerms terms, QueueEntry::Clock::time_point arrival,
                                      std::int64_t max_users, std::int64_t max_candidates) {
  const runtime::Manifest& manifest = model->manifest();
  MemoryBudget::Lease lease;
  if (terms.memory != nullptr) {
    lease = terms.memory->take(
        runtime::cut_bytes(manifest, request) +
        runtime::output_bytes(manifest, request.num_users, request.num_candidates));
  }
  const auto joiner = std::make_shared<Joiner>(model, request, std::move(done),
                                               std::move(terms.is_abandoned), std::move(lease));
  runtime::CutRequest cut =
      runtime::cut(manifest, request, std::max<std::int64_t>(max_users, 1), max_candidates);
  std::vector<QueueEntry> entries;
  entries.reserve(cut.parts.size());
  for (std::size_t i = 0; i < cut.parts.size(); ++i) {
    entries.push_back(
        {.request = std::exchange(cut.parts[i].request, {}),
         .done = [joiner, i](InferOutcome outcome) { joiner->finish(i, std::move(outcome)); },
         .terms = {.deadline = terms.deadline,
                   .is_abandoned = [joiner] { return joiner->is_abandoned(); },
                   .memory = nullptr,
                   .record = terms.record},
         .arrival = arrival,
         .is_last_part = i + 1 == cut.parts.size()});
  }
  joiner->expect(std::move(cut));
  return entries;
}

}  // namespace ikbo::server
