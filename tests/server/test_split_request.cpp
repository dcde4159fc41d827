// SPDX-License-Identifier: Apache-2.0
// Requests larger than a run, through the batcher.
#include <gtest/gtest.h>

#include <random>

#include "batcher_fixture.h"

namespace ikbo::server {
namespace {

using std::chrono::milliseconds;
using testing::GatedExecutor;
using testing::kLong;
using testing::make_request;
using testing::Runs;

class SplitRequestTest : public testing::BatcherTest {
 protected:
  // What a model without limits answers to `request`.
  static std::vector<std::string> unsplit(const runtime::Request& request) {
    runtime::Manifest wide = testing::manifest();
    wide.max_users = wide.max_candidates = 1 << 20;
    runtime::Session session(
        runtime::Model::with_executor(wide, runtime::make_stub_executor(wide)));
    return bytes(session.run({request.num_users, request.num_candidates, request.tensors}));
  }

  static void expect_whole(std::future<Batcher::Outcome>& future, const runtime::Request& request) {
    const Batcher::Outcome outcome = get(future);
    ASSERT_TRUE(std::holds_alternative<runtime::Response>(outcome))
        << std::get<RequestError>(outcome).what();
    EXPECT_EQ(bytes(std::get<runtime::Response>(outcome).outputs), unsplit(request));
  }
};

TEST_F(SplitRequestTest, FillsRunAfterRun) {
  start({});
  const runtime::Request request = make_request(1, 40, 1);
  auto future = submit(request);
  expect_whole(future, request);
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 16}, {1, 16}, {1, 8}}));
  EXPECT_EQ(metrics_.split_requests, 1u);
}

TEST_F(SplitRequestTest, ItsRestIsMergedWithOthers) {
  start({.max_candidates = 10});
  occupy_worker();
  const runtime::Request large = make_request(1, 13, 1);
  const runtime::Request small = make_request(2, 4, 2);
  auto first = submit(large);
  auto second = submit(small);
  EXPECT_EQ(metrics_.queued_requests, 2);
  executor_->set_open(true);
  expect_whole(first, large);
  expect_whole(second, small);
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 1}, {1, 10}, {3, 7}}));
}

TEST_F(SplitRequestTest, RandomRequestsGiveWhatTheyGiveUnsplit) {
  std::mt19937 random(3);
  const auto pick = [&](int first, int last) {
    return std::uniform_int_distribution<int>(first, last)(random);
  };
  for (int round = 0; round < 20; ++round) {
    start({.max_users = pick(1, 4), .max_candidates = pick(1, 16), .num_workers = pick(1, 3)});
    std::vector<runtime::Request> requests;
    std::vector<std::future<Batcher::Outcome>> futures;
    for (int i = 0; i < 12; ++i) {
      requests.push_back(make_request(pick(1, 12), pick(0, 60), 100 * round + i));
      futures.push_back(submit(requests.back()));
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      expect_whole(futures[i], requests[i]);
    }
  }
}

TEST_F(SplitRequestTest, AModelOfCandidatesAlone) {
  const runtime::Manifest plain = testing::plain_manifest();
  Batcher batcher(runtime::Model::with_executor(plain, runtime::make_stub_executor(plain)), {},
                  metrics_);
  std::vector<float> x(2 * 21);
  std::vector<float> expected;
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i);
    if (i % 2 == 1) {
      expected.push_back(x[i - 1] + x[i]);
    }
  }
  runtime::Request request;
  request.num_candidates = 21;
  request.tensors = {{DType::kFloat32, {21, 2}, x.data(), x.size() * sizeof(float)}};
  std::promise<Batcher::Outcome> promise;
  batcher.submit(request, [&](const Batcher::Outcome& outcome) { promise.set_value(outcome); });
  const auto outcome = promise.get_future().get();
  ASSERT_TRUE(std::holds_alternative<runtime::Response>(outcome));
  const runtime::Tensor& y = std::get<runtime::Response>(outcome).outputs[0];
  EXPECT_EQ(testing::values_of<float>(y.data, y.bytes), expected);
}

TEST_F(SplitRequestTest, AnErrorOfOnePartIsTheRequests) {
  start({});
  occupy_worker();
  const float poison[2] = {GatedExecutor::kPoison, 0};
  runtime::Request guilty = make_request(1, 60, 2);
  guilty.tensors[0].data = poison;
  const runtime::Request other = make_request(1, 4, 3);
  auto failed = submit(guilty);
  auto answered = submit(other);
  executor_->set_open(true);
  expect_refused(failed, ErrorKind::kExecutionFailed, "poisoned");
  expect_whole(answered, other);
  // One part was run; the others were not.
  EXPECT_EQ(executor_->wait_for_runs(4), (Runs{{1, 1}, {1, 1}, {1, 16}, {1, 4}}));
}

TEST_F(SplitRequestTest, ADeadlineEndsTheRequest) {
  start({.max_wait = milliseconds(0)});
  occupy_worker();
  auto expired = submit(make_request(1, 60, 1), within(milliseconds(20)));
  std::this_thread::sleep_for(milliseconds(40));
  executor_->set_open(true);
  expect_refused(expired, ErrorKind::kDeadlineExceeded, "it passed after ");
  auto next = submit(make_request(1, 3, 2));
  get(next);
  EXPECT_EQ(executor_->wait_for_runs(3), (Runs{{1, 1}, {1, 1}, {1, 3}}));
}

TEST_F(SplitRequestTest, ADeadlineMustLeaveTimeForAllRuns) {
  start({.max_wait = milliseconds(0)});
  executor_->set_delay(milliseconds(50));
  auto first = submit(make_request(1, 16, 1));
  get(first);
  const RequestError error =
      testing::error_of([&] { submit(make_request(1, 64, 2), within(milliseconds(150))); });
  EXPECT_EQ(error.kind(), ErrorKind::kDeadlineExceeded);
  auto in_time = submit(make_request(1, 64, 2), within(kLong));
  EXPECT_TRUE(std::holds_alternative<runtime::Response>(get(in_time)));
}

TEST_F(SplitRequestTest, WhoHasGoneIsNotRun) {
  start({});
  occupy_worker();
  RequestTerms terms;
  std::atomic<bool> is_gone = false;
  terms.is_abandoned = [&is_gone] { return is_gone.load(); };
  auto abandoned = submit(make_request(1, 60, 1), terms);
  is_gone = true;
  executor_->set_open(true);
  expect_refused(abandoned, ErrorKind::kDisconnected, "the client has gone");
}

TEST_F(SplitRequestTest, RefusesWhatFillsTooManyRuns) {
  start({.max_candidates = 10, .max_request_runs = 3});
  const RequestError candidates = testing::error_of([&] { submit(make_request(1, 31, 1)); });
  EXPECT_EQ(candidates.kind(), ErrorKind::kBadRequest);
  EXPECT_STREQ(candidates.what(),
               "model m: a request's candidates must fill at most 3 runs (--max-request-runs) of "
               "10; got 31");
  const RequestError users = testing::error_of([&] { submit(make_request(13, 4, 1)); });
  testing::expect_contains(users.what(), "a request's users must fill at most 3 runs");
  const runtime::Request request = make_request(1, 30, 2);
  auto future = submit(request);
  expect_whole(future, request);
}

TEST_F(SplitRequestTest, WhatItTakesIsCounted) {
  start({});
  MemoryBudget memory(1000);
  RequestTerms terms;
  terms.memory = &memory;
  const runtime::Request request = make_request(1, 50, 1);  // 50 * 8 + 1 * 8 bytes of outputs
  auto future = submit(request, terms);
  {
    const Batcher::Outcome outcome = get(future);
    EXPECT_EQ(bytes(std::get<runtime::Response>(outcome).outputs), unsplit(request));
    EXPECT_EQ(memory.used(), 408u);
  }
  batcher_.reset();
  EXPECT_EQ(memory.used(), 0u);
  start({});
  const RequestError error = testing::error_of([&] { submit(make_request(2, 100, 1), terms); });
  EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
  EXPECT_EQ(memory.used(), 0u);
}

TEST_F(SplitRequestTest, ItsRecordHasAllItsRuns) {
  start({});
  const auto record = std::make_shared<RequestRecord>();
  auto future = submit(make_request(1, 40, 1), {.record = record});
  ASSERT_TRUE(std::holds_alternative<runtime::Response>(get(future)));
  EXPECT_EQ(record->num_runs, 3);  // 16, 16 and 8
  EXPECT_EQ(record->run.candidates, 8);
  metrics_.finish(*record, 200);
  metrics_.observe_overhead(*record);
  const std::string page = write_metrics({}, {{"m", "7", &metrics_}});
  const std::string labels = "{model=\"m\",version=\"7\"} ";
  testing::expect_contains(page, "ikbo_split_requests_total" + labels + "1\n");
  testing::expect_contains(page, "ikbo_batch_requests_count" + labels + "3\n");
  testing::expect_contains(page, "ikbo_batch_candidates_sum" + labels + "40\n");
  testing::expect_contains(page, "ikbo_request_seconds_count" + labels + "1\n");
  testing::expect_contains(page, "ikbo_overhead_seconds_count" + labels + "0\n");
}

TEST_F(SplitRequestTest, AnAnswerComesWhenItsQuestionIsForgotten) {
  Batcher& batcher = start({});
  runtime::Request request = make_request(1, 50, 1);
  const std::weak_ptr<const void> question = request.owner;
  std::promise<bool> is_forgotten;
  batcher.submit(std::move(request),
                 [&](const Batcher::Outcome&) { is_forgotten.set_value(question.expired()); });
  EXPECT_TRUE(is_forgotten.get_future().get());
}

}  // namespace
}  // namespace ikbo::server
