// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "batcher_fixture.h"

namespace ikbo::server {
namespace {

using std::chrono::milliseconds;
using testing::BatcherTest;
using testing::GatedExecutor;
using testing::kForever;
using testing::kLong;
using testing::make_request;
using testing::manifest;
using testing::Runs;

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
  const auto first_record = std::make_shared<RequestRecord>();
  const auto second_record = std::make_shared<RequestRecord>();
  const runtime::Request request = make_request(1, 3, 1);
  auto first = submit(request, {.record = first_record});
  auto second = submit(request, {.record = second_record});
  executor_->set_delay(milliseconds(20));
  executor_->set_open(true);
  expect_answered(first, request);
  expect_answered(second, request);
  EXPECT_GE(first_record->infer, milliseconds(20));
  EXPECT_GE(second_record->infer, milliseconds(20));
  EXPECT_GE(second_record->run_begin, first_record->run_begin + milliseconds(20));
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
  for (const auto& [users, candidates] : Runs{{1, 4}, {1, 4}, {1, 1}, {1, 9}, {1, 2}}) {
    futures.push_back(submit(make_request(users, candidates, 1)));
  }
  executor_->set_open(true);
  for (auto& future : futures) {
    EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(future)));
  }
  // Users bound the first merged run, candidates the second.
  EXPECT_EQ(executor_->wait_for_runs(5), (Runs{{1, 1}, {1, 1}, {2, 8}, {2, 10}, {1, 2}}));
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
  RequestTerms terms;
  terms.is_abandoned = [&is_gone] { return is_gone.load(); };
  auto abandoned = submit(make_request(1, 4, 2), terms);
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
  // The next run is reckoned to take as long as the last two: it has to begin after 100 ms.
  auto future = submit(make_request(1, 3, 3), within(milliseconds(400)));
  EXPECT_EQ(future.wait_for(milliseconds(250)), std::future_status::ready);
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(future)));
}

TEST_F(BatcherTest, AFullQueueMakesRoomOfWhatIsOfNoMoreUse) {
  start({.max_queue = 1});
  occupy_worker();
  auto expired = submit(make_request(1, 3, 1), within(milliseconds(5)));
  std::this_thread::sleep_for(milliseconds(20));
  const runtime::Request request = make_request(1, 5, 3);
  auto answered = submit(request);
  expect_refused(expired, ErrorKind::kDeadlineExceeded, "it passed after ");
  EXPECT_EQ(testing::error_of([&] { submit(request); }).kind(), ErrorKind::kQueueFull);
  executor_->set_open(true);
  expect_answered(answered, request);
}

TEST_F(BatcherTest, ADeadlineThatCannotBeKeptIsRefusedAtOnce) {
  start({.max_wait = milliseconds(0)});
  executor_->set_delay(milliseconds(100));
  auto first = submit(make_request(1, 4, 1));
  get(first);
  RequestError error =
      testing::error_of([&] { submit(make_request(1, 4, 2), within(milliseconds(50))); });
  EXPECT_EQ(error.kind(), ErrorKind::kDeadlineExceeded);
  testing::expect_contains(error.what(), "the request's deadline must leave time for the runs");
  // While a run is under way, the next one begins at its end.
  auto running = submit(make_request(1, 4, 3));
  executor_->wait_for_runs(3);
  error = testing::error_of([&] { submit(make_request(1, 4, 4), within(milliseconds(150))); });
  EXPECT_EQ(error.kind(), ErrorKind::kDeadlineExceeded);
  EXPECT_EQ(running.wait_for(milliseconds(0)), std::future_status::timeout);
  auto in_time = submit(make_request(1, 4, 5), within(kLong));
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(running)));
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(in_time)));
  EXPECT_EQ(executor_->wait_for_runs(4).size(), 4u);
}

TEST_F(BatcherTest, ADeadlineBoundsTheRun) {
  start({.max_wait = milliseconds(0)});
  executor_->set_delay_per_candidate(milliseconds(20));
  for (const std::int64_t candidates : {1, 8, 1, 8}) {
    auto measured = submit(make_request(1, candidates, 1));
    get(measured);
  }
  executor_->set_open(false);
  auto running = submit(make_request(1, 1, 1));
  executor_->wait_for_runs(6);
  auto a = submit(make_request(1, 4, 1), within(milliseconds(280)));
  auto b = submit(make_request(1, 11, 2), within(milliseconds(900)));
  executor_->set_open(true);
  get(a);
  get(b);
  const Runs runs = executor_->wait_for_runs(8);
  EXPECT_EQ(Runs(runs.end() - 2, runs.end()), (Runs{{1, 4}, {1, 11}}));
}

TEST_F(BatcherTest, RequestsOfOneUserShareItsRow) {
  start({.max_users = 1});
  occupy_worker();
  std::vector<runtime::Request> requests;
  std::vector<std::future<Batcher::Outcome>> futures;
  for (const int candidates : {3, 4, 5}) {
    requests.push_back(make_request(1, candidates, 7));  // the same user, by the seed
    requests.back().user_key = "ann";
    futures.push_back(submit(requests.back()));
  }
  executor_->set_open(true);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    expect_answered(futures[i], requests[i]);
  }
  EXPECT_EQ(executor_->wait_for_runs(3), (Runs{{1, 1}, {1, 1}, {1, 12}}));
  EXPECT_EQ(metrics_.shared_users, 2u);
}

TEST_F(BatcherTest, MeasuresRunsOfSeveralSizesFirst) {
  batcher_.emplace(model_, BatcherOptions{.max_candidates = 12}, metrics_);
  EXPECT_EQ(executor_->wait_for_runs(11), (Runs{{1, 1},
                                                {1, 1},
                                                {1, 1},
                                                {1, 3},
                                                {1, 3},
                                                {1, 3},
                                                {1, 3},
                                                {1, 12},
                                                {1, 12},
                                                {4, 12},
                                                {4, 12}}));
}

TEST_F(BatcherTest, MeasuresNoLongerThanASecondOrSo) {
  executor_->set_delay(milliseconds(150));
  batcher_.emplace(model_, BatcherOptions{}, metrics_);
  EXPECT_EQ(executor_->wait_for_runs(3), (Runs{{1, 1}, {1, 1}, {1, 1}}));
}

}  // namespace
}  // namespace ikbo::server
