// SPDX-License-Identifier: Apache-2.0
#include "server/background.h"

#include <utility>

#include "server/thread_name.h"

namespace ikbo::server {

Background::Background() : thread_([this] { work(); }) {}

Background::~Background() { stop(); }

void Background::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  std::multimap<Clock::time_point, Task> left;
  const std::lock_guard lock(mutex_);
  is_stopped_ = true;
  left.swap(tasks_);
}

void Background::post(Task task, Clock::time_point due) {
  std::unique_lock lock(mutex_);
  if (!is_stopped_) {
    tasks_.emplace(due, std::move(task));
    lock.unlock();
    changed_.notify_all();
    return;
  }
  lock.unlock();
  if (due <= Clock::now()) {
    task();
  }
}

void Background::work() {
  name_this_thread("ikbo-tasks");
  for (;;) {
    // Of this turn alone: what a task holds must not live on while the thread waits.
    const Task task = take();
    if (!task) {
      return;
    }
    task();
  }
}

Background::Task Background::take() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!tasks_.empty() && tasks_.begin()->first <= Clock::now()) {
      return std::move(tasks_.extract(tasks_.begin()).mapped());
    }
    if (is_stopping_) {
      return {};
    }
    if (tasks_.empty()) {
      changed_.wait(lock);
    } else {
      const Clock::time_point due = tasks_.begin()->first;  // the wait reads it without the mutex
      changed_.wait_until(lock, due);
    }
  }
}

}  // namespace ikbo::server
