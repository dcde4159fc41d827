// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "fixtures.h"
#include "runtime/executor.h"
#include "server/batcher.h"

namespace ikbo::server {
namespace {

using std::chrono::milliseconds;
using testing::make_request;
using testing::manifest;

constexpr std::chrono::seconds kLong{30};  // longer than anything here takes
constexpr std::chrono::hours kForever{1};

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
    std::this_thread::sleep_for(delay_.load());
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
  std::vector<std::pair<std::int64_t, std::int64_t>> runs_;
};

class BatcherTest : public ::testing::Test {
 protected:
  Batcher& start(const BatcherOptions& options) {
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
    return {.deadline = Batcher::Clock::now() + time, .is_abandoned = {}};
  }

  static void expect_refused(std::future<Batcher::Outcome>& future, ErrorKind kind,
                             const std::string& part) {
    const Batcher::Outcome outcome = get(future);
    const auto* error = std::get_if<RequestError>(&outcome);
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(error->kind(), kind);
    testing::expect_contains(error->what(), part);
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

TEST_F(BatcherTest, MergedAnswersEqualLoneAnswersBitwise) {
  start({});
  occupy_worker();
  std::vector<runtime::Request> requests = {make_request(1, 5, 1), make_request(2, 4, 2),
                                            make_request(1, 7, 3)};
  std::vector<std::future<Batcher::Outcome>> futures;
  futures.reserve(requests.size());
  for (const runtime::Request& request : requests) {
    futures.push_back(submit(request));
  }
  executor_->set_open(true);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    expect_answered(futures[i], requests[i]);
  }
  EXPECT_EQ(executor_->wait_for_runs(3), (Runs{{1, 1}, {1, 1}, {4, 16}}));
}

TEST_F(BatcherTest, NotesTheTimeInTheQueueAndInTheModel) {
  start({.max_users = 1});
  occupy_worker();
  RequestTimes first_times;
  RequestTimes second_times;
  const runtime::Request request = make_request(1, 3, 1);
  auto first = submit(request, {.times = &first_times});
  auto second = submit(request, {.times = &second_times});
  executor_->set_delay(milliseconds(20));
  executor_->set_open(true);
  expect_answered(first, request);
  expect_answered(second, request);
  EXPECT_GE(first_times.ran, milliseconds(20));
  EXPECT_GE(second_times.ran, milliseconds(20));
  EXPECT_GE(second_times.queued, first_times.queued + milliseconds(20));
}

TEST_F(BatcherTest, AnIdleWorkerRunsAtOnce) {
  start({.max_wait = kForever});
  for (int i = 0; i < 3; ++i) {
    const runtime::Request request = make_request(1, 3, i);
    auto future = submit(request);
    expect_answered(future, request);
  }
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 3}, {1, 3}, {1, 3}}));
}

TEST_F(BatcherTest, MergesUpToTheLimitsInOrderOfArrival) {
  start({.max_users = 2, .max_candidates = 10, .max_wait = milliseconds(0)});
  occupy_worker();
  std::vector<std::future<Batcher::Outcome>> futures;
  for (const auto& [users, candidates] : Runs{{1, 4}, {1, 4}, {1, 1}, {1, 9}, {1, 2}, {3, 16}}) {
    futures.push_back(submit(make_request(users, candidates, 1)));
  }
  executor_->set_open(true);
  for (auto& future : futures) {
    EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(future)));
  }
  // Users bound the first merged run, candidates the second; the last request is over both limits.
  EXPECT_EQ(executor_->wait_for_runs(6), (Runs{{1, 1}, {1, 1}, {2, 8}, {2, 10}, {1, 2}, {3, 16}}));
}

TEST_F(BatcherTest, WaitsForAsManyRequestsAsTheRunBeforeMerged) {
  start({.max_wait = kForever});
  run_merged(milliseconds(500));
  auto c = submit(make_request(1, 3, 3));
  EXPECT_EQ(c.wait_for(milliseconds(20)), std::future_status::timeout);
  auto d = submit(make_request(1, 4, 4));
  get(c);
  get(d);
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 1}, {2, 4}, {2, 7}}));
}

TEST_F(BatcherTest, WaitsNoLongerThanMaxWait) {
  start({.max_wait = milliseconds(1)});
  run_merged(milliseconds(500));
  auto c = submit(make_request(1, 3, 3));
  EXPECT_EQ(c.wait_for(milliseconds(450)), std::future_status::ready);
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 1}, {2, 4}, {1, 3}}));
}

TEST_F(BatcherTest, WaitsNoLongerThanTheRunBeforeTook) {
  start({.max_wait = kForever});
  run_merged(milliseconds(0));
  auto c = submit(make_request(1, 3, 3));
  get(c);
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 1}, {2, 4}, {1, 3}}));
}

TEST_F(BatcherTest, RefusesWhatTheQueueCannotHold) {
  start({.max_queue = 2});
  occupy_worker();
  auto a = submit(make_request(1, 2, 1));
  auto b = submit(make_request(1, 2, 2));
  EXPECT_EQ(metrics_.queued_requests, 2);
  const RequestError error = testing::error_of([&] { submit(make_request(1, 2, 3)); });
  EXPECT_EQ(error.kind(), ErrorKind::kQueueFull);
  executor_->set_open(true);
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(a)));
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(b)));
  EXPECT_EQ(metrics_.queued_requests, 0);
}

TEST_F(BatcherTest, OnlyTheGuiltyRequestOfARunFails) {
  start({});
  occupy_worker();
  const float poison[2] = {GatedExecutor::kPoison, 0};
  runtime::Request guilty = make_request(1, 2, 2);
  guilty.tensors[0].data = poison;
  const runtime::Request before = make_request(1, 2, 1);
  const runtime::Request after = make_request(1, 2, 3);
  auto a = submit(before);
  auto b = submit(guilty);
  auto c = submit(after);
  executor_->set_open(true);
  expect_answered(a, before);
  expect_answered(c, after);
  const Batcher::Outcome outcome = get(b);
  ASSERT_TRUE(std::holds_alternative<RequestError>(outcome));
  EXPECT_EQ(std::get<RequestError>(outcome).kind(), ErrorKind::kExecutionFailed);
  EXPECT_STREQ(std::get<RequestError>(outcome).what(), "poisoned");
}

TEST_F(BatcherTest, FinishesWhatItAcceptedBeforeItEnds) {
  start({.max_users = 1, .max_wait = kForever});
  occupy_worker();
  std::vector<std::future<Batcher::Outcome>> futures;
  futures.reserve(5);
  for (int i = 0; i < 5; ++i) {
    futures.push_back(submit(make_request(1, 2, i)));
  }
  executor_->set_open(true);
  batcher_.reset();
  for (auto& future : futures) {
    ASSERT_EQ(future.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    EXPECT_TRUE(std::holds_alternative<runtime::Response>(future.get()));
  }
}

TEST_F(BatcherTest, WorkersRunAtTheSameTime) {
  start({.num_workers = 2});
  executor_->wait_for_runs(2);
  executor_->set_open(false);
  auto a = submit(make_request(1, 2, 1));
  executor_->wait_for_runs(3);
  auto b = submit(make_request(1, 3, 2));
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 1}, {1, 2}, {1, 3}}));
  executor_->set_open(true);
  get(a);
  get(b);
}

TEST_F(BatcherTest, HoldsNoRequestOnceItIsAnswered) {
  start({});
  std::weak_ptr<const void> owner;
  {
    runtime::Request request = make_request(1, 2, 1);
    owner = request.owner;
    auto future = submit(std::move(request));
    get(future);
  }
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  while (!owner.expired() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(owner.expired());
}

TEST(Batcher, FailsToStartWhenTheModelCannotRun) {
  class Broken final : public runtime::Executor {
    std::vector<runtime::Tensor> run(const runtime::RunInputs&) override { throw Error("broken"); }
  };
  ModelMetrics metrics;
  const auto model = runtime::Model::with_executor(manifest(), std::make_shared<Broken>());
  EXPECT_THROW(Batcher(model, {.num_workers = 3}, metrics), Error);
}

TEST(Batcher, ServesAModelWithoutUsers) {
  const runtime::Manifest plain = testing::plain_manifest();
  ModelMetrics metrics;
  Batcher batcher(runtime::Model::with_executor(plain, runtime::make_stub_executor(plain)), {},
                  metrics);
  const std::vector<float> x = {1, 2, 3, 4};
  runtime::Request request;
  request.num_candidates = 2;
  request.tensors = {{DType::kFloat32, {2, 2}, x.data(), 16}};
  std::promise<Batcher::Outcome> promise;
  batcher.submit(request, [&](const Batcher::Outcome& outcome) { promise.set_value(outcome); });
  const auto outcome = promise.get_future().get();
  ASSERT_TRUE(std::holds_alternative<runtime::Response>(outcome));
  const runtime::Tensor& y = std::get<runtime::Response>(outcome).outputs[0];
  EXPECT_EQ(testing::values_of<float>(y.data, y.bytes), (std::vector<float>{3, 7}));
}

TEST_F(BatcherTest, AnAnswerComesWhenItsQuestionIsForgotten) {
  Batcher& batcher = start({});
  runtime::Request request = make_request(1, 2, 1);
  const std::weak_ptr<const void> question = request.owner;
  std::promise<bool> is_forgotten;
  batcher.submit(std::move(request),
                 [&](const Batcher::Outcome&) { is_forgotten.set_value(question.expired()); });
  EXPECT_TRUE(is_forgotten.get_future().get());
}

TEST_F(BatcherTest, WhatIsOfNoMoreUseIsNotRun) {
  start({});
  occupy_worker();
  auto expired = submit(make_request(1, 3, 1), within(milliseconds(5)));
  std::atomic<bool> is_gone = false;
  auto abandoned =
      submit(make_request(1, 4, 2), {.is_abandoned = [&is_gone] { return is_gone.load(); }});
  const runtime::Request request = make_request(1, 5, 3);
  auto answered = submit(request, within(kLong));
  is_gone = true;
  std::this_thread::sleep_for(milliseconds(20));
  executor_->set_open(true);
  expect_refused(expired, ErrorKind::kDeadlineExceeded, "it passed after ");
  expect_refused(abandoned, ErrorKind::kDisconnected, "the client has gone");
  expect_answered(answered, request);
  EXPECT_EQ(executor_->wait_for_runs(3), (Runs{{1, 1}, {1, 1}, {1, 5}}));
}

TEST_F(BatcherTest, TheEarliestDeadlineGoesFirst) {
  start({.max_users = 1, .max_wait = milliseconds(0)});
  occupy_worker();
  std::vector<std::future<Batcher::Outcome>> futures;
  futures.push_back(submit(make_request(1, 2, 1)));
  futures.push_back(submit(make_request(1, 3, 2), within(kLong)));  // as one without a deadline
  futures.push_back(submit(make_request(1, 4, 3), within(milliseconds(900))));
  futures.push_back(submit(make_request(1, 5, 4), within(milliseconds(800))));
  executor_->set_open(true);
  for (auto& future : futures) {
    EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(future)));
  }
  EXPECT_EQ(executor_->wait_for_runs(6), (Runs{{1, 1}, {1, 1}, {1, 5}, {1, 4}, {1, 2}, {1, 3}}));
}

TEST_F(BatcherTest, ADeadlineEndsTheWaitForCompany) {
  start({.max_wait = kForever});
  run_merged(milliseconds(300));
  // The next run is reckoned to take as long as the last one: it has to begin after 100 ms.
  auto future = submit(make_request(1, 3, 3), within(milliseconds(400)));
  EXPECT_EQ(future.wait_for(milliseconds(250)), std::future_status::ready);
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(future)));
}

TEST_F(BatcherTest, AFullQueueMakesRoomOfWhatIsOfNoMoreUse) {
  start({.max_queue = 1});
  occupy_worker();
  auto expired = submit(make_request(1, 3, 1), within(milliseconds(-1)));
  const runtime::Request request = make_request(1, 5, 3);
  auto answered = submit(request);
  expect_refused(expired, ErrorKind::kDeadlineExceeded, "it passed after ");
  EXPECT_EQ(testing::error_of([&] { submit(request); }).kind(), ErrorKind::kQueueFull);
  executor_->set_open(true);
  expect_answered(answered, request);
}

}  // namespace
}  // namespace ikbo::server
