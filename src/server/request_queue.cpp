// SPDX-License-Identifier: Apache-2.0
#include "server/request_queue.h"

#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

namespace ikbo::server {
namespace {

std::string microseconds(std::chrono::steady_clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(time).count()) +
         " us";
}

// Why `entry` is not to be run; nothing when it is.
std::optional<RequestError> why_useless(const QueueEntry& entry, Admission& admission,
                                        QueueEntry::Clock::time_point now) {
  const RequestTerms& terms = entry.terms;
  if (terms.is_abandoned && terms.is_abandoned()) {
    return RequestError(ErrorKind::kDisconnected, "the client has gone");
  }
  if (terms.deadline <= now) {
    return RequestError(ErrorKind::kDeadlineExceeded,
                        "the request's deadline must be later than its run; it passed after " +
                            microseconds(now - entry.arrival) + " in the queue");
  }
  const auto needed = admission.time(entry.request.num_users, entry.request.num_candidates);
  if (admission.is_too_late(now, now, needed, terms.deadline)) {
    return RequestError(ErrorKind::kDeadlineExceeded,
                        "the request's deadline must leave time for its run, about " +
                            microseconds(needed) + "; " + microseconds(terms.deadline - now) +
                            " are left after " + microseconds(now - entry.arrival) +
                            " in the queue");
  }
  return std::nullopt;
}

}  // namespace

std::uint64_t RequestQueue::user_of(const runtime::Request& request) {
  if (request.user_key.empty() || request.num_users != 1) {
    return 0;
  }
  for (const QueueEntry& queued : entries_) {
    if (runtime::have_same_user(manifest_, queued.request, request)) {
      return queued.user;
    }
  }
  return ++num_users_;
}

void RequestQueue::add(QueueEntry entry) {
  entry.user = user_of(entry.request);
  num_requests_ += entry.is_last_part ? 1 : 0;
  const auto later = std::upper_bound(
      entries_.begin(), entries_.end(), entry.due(),
      [](Clock::time_point due, const QueueEntry& queued) { return due < queued.due(); });
  entries_.insert(later, std::move(entry));
}

std::vector<RefusedEntry> RequestQueue::take_useless(Clock::time_point now) {
  std::vector<RefusedEntry> refused;
  auto kept = entries_.begin();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (std::optional<RequestError> error = why_useless(*it, admission_, now)) {
      num_requests_ -= it->is_last_part ? 1 : 0;
      refused.push_back({std::move(*it), *std::move(error)});
      continue;
    }
    if (kept != it) {
      *kept = std::move(*it);
    }
    ++kept;
  }
  entries_.erase(kept, entries_.end());
  return refused;
}

NextRun RequestQueue::next_run(Clock::time_point now) const {
  NextRun run;
  const RunCost& cost = admission_.cost();
  const double waiting = seconds_before(Clock::time_point::max());
  const double enough = cost.rows_of_next_run(waiting, admission_.num_workers());
  std::unordered_set<std::uint64_t> users;
  Clock::time_point deadline = Clock::time_point::max();
  for (const QueueEntry& entry : entries_) {
    const bool is_known = entry.user != 0 && users.contains(entry.user);
    const std::int64_t num_users = run.num_users + (is_known ? 0 : entry.request.num_users);
    const std::int64_t num_candidates = run.num_candidates + entry.request.num_candidates;
    const Clock::time_point first_deadline = std::min(deadline, entry.terms.deadline);
    const bool fits = num_users <= max_users_ && num_candidates <= max_candidates_;
    const auto needed = admission_.careful_time(num_users, num_candidates);
    const bool is_in_time =
        first_deadline == Clock::time_point::max() || now + needed <= first_deadline;
    const bool pays =
        waiting <= 0 || cost.seconds_of_rows(run.num_users, run.num_candidates) < enough;
    if (run.size > 0 && !(fits && is_in_time && pays)) {
      run.is_full = true;
      break;
    }
    if (entry.user != 0) {
      users.insert(entry.user);
    }
    ++run.size;
    run.num_users = num_users;
    run.num_candidates = num_candidates;
    run.first_arrival = std::min(run.first_arrival, entry.arrival);
    deadline = first_deadline;
    if (deadline != Clock::time_point::max()) {
      run.begin_by = deadline - needed;
    }
  }
  return run;
}

std::vector<QueueEntry> RequestQueue::take_front(std::size_t size) {
  std::vector<QueueEntry> taken;
  taken.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    num_requests_ -= entries_.front().is_last_part ? 1 : 0;
    taken.push_back(std::move(entries_.front()));
    entries_.pop_front();
  }
  return taken;
}

RequestQueue::Clock::duration RequestQueue::time_before(Clock::time_point due) const {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds_before(due)));
}

double RequestQueue::seconds_before(Clock::time_point due) const {
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  for (const QueueEntry& entry : entries_) {
    if (entry.due() > due) {
      break;
    }
    num_users += entry.request.num_users;
    num_candidates += entry.request.num_candidates;
  }
  return admission_.cost().seconds_of_rows(num_users, num_candidates);
}

}  // namespace ikbo::server
