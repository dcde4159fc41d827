// SPDX-License-Identifier: Apache-2.0
// A batcher around an executor that tests can hold back.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fixtures.h"
#include "runtime/executor.h"
#include "server/batcher.h"

namespace ikbo::server::testing {

using std::chrono::milliseconds;

inline constexpr std::chrono::seconds kLong{30};  // longer than anything here takes
inline constexpr std::chrono::hours kForever{1};

// The stub executor behind a gate, which records the runs that pass it. A run whose first user
// value is kPoison fails.
class GatedExecutor final : public runtime::Executor {
 public:
  static constexpr float kPoison = -1;

  std::vector<runtime::Tensor> run(const runtime::RunInputs& inputs) override {
    {
      std::unique_lock lock(mutex_);
      runs_.push_back({inputs.num_users, inputs.num_candidates});
      changed_.notify_all();
      changed_.wait(lock, [this] { return is_open_; });
    }
    std::this_thread::sleep_for(delay_.load() +
                                delay_per_candidate_.load() * inputs.num_candidates);
    const auto* users = static_cast<const float*>(inputs.tensors[0].data);
    for (std::int64_t u = 0; u < inputs.num_users; ++u) {
      IKBO_CHECK(users[2 * u] != kPoison, "poisoned");
    }
    return stub_->run(inputs);
  }

  void set_open(bool is_open) {
    const std::lock_guard lock(mutex_);
    is_open_ = is_open;
    changed_.notify_all();
  }

  // How long each run takes from here on.
  void set_delay(milliseconds delay) { delay_ = delay; }
  void set_delay_per_candidate(milliseconds delay) { delay_per_candidate_ = delay; }

  // Sizes {users, candidates} of the runs, once there are `count`; the first ones are warm-ups.
  std::vector<std::pair<std::int64_t, std::int64_t>> wait_for_runs(std::size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kLong, [&] { return runs_.size() >= count; }));
    return runs_;
  }

 private:
  const std::shared_ptr<Executor> stub_ = runtime::make_stub_executor(manifest());
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = true;
  std::atomic<milliseconds> delay_{milliseconds(0)};
  std::atomic<milliseconds> delay_per_candidate_{milliseconds(0)};
  std::vector<std::pair<std::int64_t, std::int64_t>> runs_;
};

class BatcherTest : public ::testing::Test {
 protected:
  // Without calibration: the runs that a test sees are those of its requests.
  Batcher& start(BatcherOptions options) {
    options.no_calibration = true;
    batcher_.emplace(model_, options, metrics_);
    return *batcher_;
  }

  std::future<Batcher::Outcome> submit(runtime::Request request, RequestTerms terms = {}) {
    auto promise = std::make_shared<std::promise<Batcher::Outcome>>();
    auto future = promise->get_future();
    batcher_->submit(
        std::move(request),
        [promise](Batcher::Outcome outcome) { promise->set_value(std::move(outcome)); },
        std::move(terms));
    return future;
  }

  static RequestTerms within(milliseconds time) {
    RequestTerms terms;
    terms.deadline = Batcher::Clock::now() + time;
    return terms;
  }

  static void expect_refused(std::future<Batcher::Outcome>& future, ErrorKind kind,
                             const std::string& part) {
    const Batcher::Outcome outcome = get(future);
    const auto* error = std::get_if<RequestError>(&outcome);
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(error->kind(), kind);
    expect_contains(error->what(), part);
  }

  // Closes the gate and has the one worker wait behind it, in a run of its own.
  void occupy_worker() {
    executor_->set_open(false);
    static_cast<void>(submit(make_request(1, 1, 99)));
    executor_->wait_for_runs(2);
  }

  // One run of two requests, which takes `time`.
  void run_merged(milliseconds time) {
    occupy_worker();
    auto a = submit(make_request(1, 2, 1));
    auto b = submit(make_request(1, 2, 2));
    executor_->set_delay(time);
    executor_->set_open(true);
    get(a);
    get(b);
    executor_->set_delay(milliseconds(0));
  }

  static Batcher::Outcome get(std::future<Batcher::Outcome>& future) {
    EXPECT_EQ(future.wait_for(kLong), std::future_status::ready);
    return future.get();
  }

  // What the model answers to `request` when nothing else is running.
  std::vector<std::string> alone(const runtime::Request& request) {
    runtime::Session session(
        runtime::Model::with_executor(manifest(), runtime::make_stub_executor(manifest())));
    return bytes(session.run({request.num_users, request.num_candidates, request.tensors}));
  }

  static std::vector<std::string> bytes(const std::vector<runtime::Tensor>& tensors) {
    std::vector<std::string> all;
    all.reserve(tensors.size());
    for (const runtime::Tensor& tensor : tensors) {
      all.emplace_back(static_cast<const char*>(tensor.data), tensor.bytes);
    }
    return all;
  }

  void expect_answered(std::future<Batcher::Outcome>& future, const runtime::Request& request) {
    const Batcher::Outcome outcome = get(future);
    ASSERT_TRUE(std::holds_alternative<runtime::Response>(outcome));
    EXPECT_EQ(bytes(std::get<runtime::Response>(outcome).outputs), alone(request));
  }

  std::shared_ptr<GatedExecutor> executor_ = std::make_shared<GatedExecutor>();
  std::shared_ptr<const runtime::Model> model_ =
      runtime::Model::with_executor(manifest(), executor_);
  ModelMetrics metrics_;
  std::optional<Batcher> batcher_;
};

using Runs = std::vector<std::pair<std::int64_t, std::int64_t>>;

}  // namespace ikbo::server::testing
