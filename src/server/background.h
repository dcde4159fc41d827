// SPDX-License-Identifier: Apache-2.0
// One thread for what must not hold up requests: loading models, ending them, trying again later.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace ikbo::server {

class Background {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;

  Background();
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Runs `task`, which must not throw, at `due` or as soon afterwards as the tasks before it allow.
  // Thread-safe; a task may post others.
  void post(Task task, Clock::time_point due = Clock::now());
  // Finishes the tasks that are due and drops those that are not. What is posted afterwards is run
  // by the one who posts it when it is due, and dropped otherwise. Not by a task.
  void stop();

 private:
  void work();
  // The next task to run, waiting for it; empty: stopping and none is due.
  Task take();

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::multimap<Clock::time_point, Task> tasks_;
  bool is_stopping_ = false;
  bool is_stopped_ = false;

  std::thread thread_;
};

}  // namespace ikbo::server
