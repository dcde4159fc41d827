// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <functional>
#include <limits>

#include "fixtures.h"
#include "runtime/executor.h"

namespace ikbo::runtime::testing {
namespace {

std::vector<const Request*> pointers(const std::vector<Request>& requests) {
  std::vector<const Request*> result;
  result.reserve(requests.size());
  for (const Request& request : requests) {
    result.push_back(&request);
  }
  return result;
}

TEST(CheckRequest, TakesWhatFits) {
  for (const std::int64_t users : {1, 2, 4}) {
    for (const std::int64_t candidates : {0, 1, 16}) {
      EXPECT_NO_THROW(check_request(manifest(), make_request(users, candidates, 1)));
    }
  }
}

TEST(CheckRequest, TakesAnAbsentIndexOfOneUserOnly) {
  Request one = make_request(1, 5, 1);
  one.tensors[kIndex] = TensorView{};
  EXPECT_NO_THROW(check_request(manifest(), one));
  Request two = make_request(2, 5, 1);
  two.tensors[kIndex] = TensorView{};
  expect_contains(error_of([&] { check_request(manifest(), two); }),
                  "model ranker: input cand_to_user may be left out only when there is one user; "
                  "got 2 users");
}

TEST(CheckRequest, TakesDataOfAnyAlignment) {
  Request request = make_request(2, 5, 1);
  std::vector<std::byte> shifted(request.tensors[kIndex].bytes + 1);
  std::memcpy(shifted.data() + 1, request.tensors[kIndex].data, request.tensors[kIndex].bytes);
  request.tensors[kIndex].data = shifted.data() + 1;
  EXPECT_NO_THROW(check_request(manifest(), request));
}

struct Bad {
  const char* id;
  std::function<void(Request&)> spoil;  // applied to a request of 2 users and 5 candidates
  const char* message;
};

std::ostream& operator<<(std::ostream& out, const Bad& bad) { return out << bad.id; }

class BadRequest : public ::testing::TestWithParam<Bad> {};

// Overwrites one element of an input; the request owns its buffers, so the cast is fine.
template <typename T>
void set(Request& request, std::size_t input, std::size_t position, T value) {
  auto* data = static_cast<std::byte*>(const_cast<void*>(request.tensors[input].data));
  std::memcpy(data + position * sizeof(T), &value, sizeof(T));
}

TEST_P(BadRequest, IsRefusedWithInputRequirementAndValue) {
  Request request = make_request(2, 5, 1);
  GetParam().spoil(request);
  expect_contains(error_of([&] { check_request(manifest(), request); }),
                  std::string("model ranker: ") + GetParam().message);
}

TEST_P(BadRequest, IsRefusedByASessionToo) {
  Request request = make_request(2, 5, 1);
  GetParam().spoil(request);
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  EXPECT_NE(
      error_of([&] { session.run({request.num_users, request.num_candidates, request.tensors}); }),
      "");
  const Request good = make_request(2, 5, 1);
  EXPECT_NO_THROW(session.run({2, 5, good.tensors}));
}

INSTANTIATE_TEST_SUITE_P(
    Requests, BadRequest,
    ::testing::Values(
        Bad{"no_users", [](Request& r) { r.num_users = 0; },
            "the number of users must be in [1, 2147483647]; got 0"},
        Bad{"users_negative", [](Request& r) { r.num_users = -2; },
            "the number of users must be in [1, 2147483647]; got -2"},
        Bad{"candidates_negative",
            [](Request& r) { r.num_candidates = std::numeric_limits<std::int64_t>::min(); },
            "the number of candidates must be in [0, 2147483647]; got -9223372036854775808"},
        Bad{"input_missing", [](Request& r) { r.tensors.pop_back(); },
            "must be given 5 inputs; got 4"},
        Bad{"input_too_many", [](Request& r) { r.tensors.push_back(r.tensors[0]); },
            "must be given 5 inputs; got 6"},
        Bad{"dtype", [](Request& r) { r.tensors[kItem].dtype = DType::kFloat64; },
            "input item must have dtype float32; got float64"},
        Bad{"rank", [](Request& r) { r.tensors[kItem].shape = {5, 2, 1}; },
            "input item must have shape [5, 2]; got [5, 2, 1]"},
        Bad{"extent", [](Request& r) { r.tensors[kItem].shape = {5, 3}; },
            "input item must have shape [5, 2]; got [5, 3]"},
        Bad{"rows_of_other_role", [](Request& r) { r.tensors[kHistory].shape = {5, 3}; },
            "input history must have shape [2, 3]; got [5, 3]"},
        Bad{"bytes_short", [](Request& r) { r.tensors[kItem].bytes -= 1; },
            "input item must have 40 bytes (shape [5, 2], float32); got 39"},
        Bad{"bytes_long", [](Request& r) { r.tensors[kItem].bytes += 4; },
            "input item must have 40 bytes (shape [5, 2], float32); got 44"},
        Bad{"null_data", [](Request& r) { r.tensors[kItem].data = nullptr; },
            "input item must have data; got a null pointer"},
        Bad{"absent_tensor", [](Request& r) { r.tensors[kAge] = TensorView{}; },
            "input age must be given; got none"},
        Bad{"index_too_large", [](Request& r) { set<std::int32_t>(r, kIndex, 3, 2); },
            "input cand_to_user must have values in [0, 1]; got 2 at position 3"},
        Bad{"index_negative", [](Request& r) { set<std::int32_t>(r, kIndex, 4, -1); },
            "input cand_to_user must have values in [0, 1]; got -1 at position 4"},
        Bad{"value_too_large", [](Request& r) { set<std::int64_t>(r, kAge, 1, 121); },
            "input age must have values in [0, 120]; got 121 at position 1"},
        Bad{"value_too_small",
            [](Request& r) {
              set<std::int64_t>(r, kAge, 0, std::numeric_limits<std::int64_t>::min());
            },
            "input age must have values in [0, 120]; got -9223372036854775808 at position 0"},
        Bad{"bool_two", [](Request& r) { set<std::uint8_t>(r, kIsNew, 1, 2); },
            "input is_new must have values in [0, 1]; got 2 at position 1"}));

TEST(CheckRequest, TakesMoreThanOneRunDoes) {
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  const auto run = [&](const Request& request) {
    return error_of(
        [&] { session.run({request.num_users, request.num_candidates, request.tensors}); });
  };
  const Request users = make_request(5, 5, 1);
  EXPECT_NO_THROW(check_request(manifest(), users));
  expect_contains(run(users), "the number of users must be in [1, 4]; got 5");
  const Request candidates = make_request(2, 17, 1);
  EXPECT_NO_THROW(check_request(manifest(), candidates));
  expect_contains(run(candidates), "the number of candidates must be in [0, 16]; got 17");
}

TEST(CheckRequest, RefusesRowsThatNobodyCanCount) {
  Manifest wide = manifest();
  wide.inputs[kItem].shape = {-1, std::int64_t{1} << 40};
  Request request = make_request(1, 0, 1);
  request.num_candidates = 1 << 22;
  request.tensors[kIndex] = TensorView{};
  const std::vector<char> flags(1 << 22);
  request.tensors[kIsNew] = {DType::kBool, {1 << 22}, flags.data(), flags.size()};
  request.tensors[kItem] = {DType::kFloat32, {1 << 22, std::int64_t{1} << 40}, flags.data(), 0};
  expect_contains(error_of([&] { check_request(wide, request); }),
                  "input item must have fewer than 2^64 bytes; got shape [4194304, 1099511627776]");
}

TEST(Batch, PassesASingleRequestThrough) {
  const Request request = make_request(2, 5, 1);
  const Batch run = batch(manifest(), {&request});
  EXPECT_EQ(run.inputs.num_users, 2);
  EXPECT_EQ(run.inputs.num_candidates, 5);
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    EXPECT_EQ(run.inputs.tensors[i].data, request.tensors[i].data) << i;
  }
}

TEST(Batch, KeepsTheOwnerOfASingleRequest) {
  Request request = make_request(1, 2, 1);
  const std::weak_ptr<const void> owner = request.owner;
  const Batch run = batch(manifest(), {&request});
  request = Request{};
  EXPECT_FALSE(owner.expired());
}

TEST(Batch, MakesTheAbsentIndexOfASingleRequest) {
  Request request = make_request(1, 3, 1);
  request.tensors[kIndex] = TensorView{};
  const Batch run = batch(manifest(), {&request});
  EXPECT_EQ(values_of<std::int32_t>(run.inputs.tensors[kIndex]),
            (std::vector<std::int32_t>{0, 0, 0}));
  EXPECT_EQ(run.inputs.tensors[kIndex].shape, Shape{3});
  EXPECT_EQ(run.inputs.tensors[kIndex].dtype, DType::kInt32);
  EXPECT_EQ(run.inputs.tensors[kItem].data, request.tensors[kItem].data);
}

TEST(Batch, ConcatenatesRowsAndRebasesTheIndex) {
  std::vector<Request> requests = {make_request(2, 4, 1), make_request(1, 0, 2),
                                   make_request(1, 3, 3)};
  requests[2].tensors[kIndex] = TensorView{};
  const Batch run = batch(manifest(), pointers(requests));
  EXPECT_EQ(run.places, (std::vector<Placement>{{0, 2, 0, 4}, {2, 1, 4, 0}, {3, 1, 4, 3}}));
  EXPECT_EQ(run.inputs.num_users, 4);
  EXPECT_EQ(run.inputs.num_candidates, 7);
  EXPECT_EQ(run.inputs.tensors[kHistory].shape, (Shape{4, 3}));
  EXPECT_EQ(run.inputs.tensors[kItem].shape, (Shape{7, 2}));

  std::vector<float> items;
  std::vector<std::int64_t> ages;
  for (const Request& request : requests) {
    for (const float value : values_of<float>(request.tensors[kItem])) {
      items.push_back(value);
    }
    for (const std::int64_t value : values_of<std::int64_t>(request.tensors[kAge])) {
      ages.push_back(value);
    }
  }
  EXPECT_EQ(values_of<float>(run.inputs.tensors[kItem]), items);
  EXPECT_EQ(values_of<std::int64_t>(run.inputs.tensors[kAge]), ages);
  std::vector<std::int32_t> index = values_of<std::int32_t>(requests[0].tensors[kIndex]);
  index.insert(index.end(), {3, 3, 3});
  EXPECT_EQ(values_of<std::int32_t>(run.inputs.tensors[kIndex]), index);
}

TEST(Batch, TakesRequestsWithoutAnyCandidate) {
  const std::vector<Request> requests = {make_request(1, 0, 1), make_request(2, 0, 2)};
  const Batch run = batch(manifest(), pointers(requests));
  EXPECT_EQ(run.inputs.num_candidates, 0);
  EXPECT_EQ(run.inputs.tensors[kItem].shape, (Shape{0, 2}));
}

TEST(Batch, RefusesMoreThanThePackageTakes) {
  const std::vector<Request> users = {make_request(3, 1, 1), make_request(2, 1, 2)};
  expect_contains(error_of([&] { batch(manifest(), pointers(users)); }),
                  "model ranker: the users of one run must be at most 4; got 5 in 2 requests");
  const std::vector<Request> candidates = {make_request(1, 16, 1), make_request(1, 1, 2)};
  expect_contains(error_of([&] { batch(manifest(), pointers(candidates)); }),
                  "the candidates of one run must be at most 16; got 17 in 2 requests");
  expect_contains(error_of([] { batch(manifest(), {}); }), "at least one request");
}

Request with_key(Request request, const char* key) {
  request.user_key = key;
  return request;
}

// `request` with the user rows of `other`.
Request with_user_of(const Request& other, Request request) {
  for (const std::size_t input : {kAge, kHistory}) {
    request.tensors[input] = other.tensors[input];
  }
  request.owner =
      std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
          request.owner, other.owner);
  return request;
}

TEST(Batch, RequestsOfOneUserShareItsRow) {
  const Request first = with_key(make_request(1, 3, 1), "ann");
  const std::vector<Request> requests = {
      make_request(2, 4, 2),                                         // of nobody known
      first,                                                         //
      with_key(with_user_of(first, make_request(1, 2, 3)), "ann"),   // shares
      with_key(with_user_of(first, make_request(1, 1, 4)), "bob"),   // another key
      with_key(with_user_of(first, make_request(1, 2, 6)), "ann")};  // shares
  const Batch run = batch(manifest(), pointers(requests));
  EXPECT_EQ(
      run.places,
      (std::vector<Placement>{
          {0, 2, 0, 4}, {2, 1, 4, 3}, {2, 1, 7, 2, true}, {3, 1, 9, 1}, {2, 1, 10, 2, true}}));
  EXPECT_EQ(run.inputs.num_users, 4);
  EXPECT_EQ(values_of<std::int32_t>(run.inputs.tensors[kIndex]).back(), 2);
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  const std::vector<Response> responses = split(manifest(), run, session.run(run.inputs));
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const Batch alone = batch(manifest(), {&requests[r]});
    const std::vector<Tensor> expected = session.run(alone.inputs);
    EXPECT_EQ(values_of<float>(responses[r].outputs[kScore]), values_of<float>(expected[kScore]));
    EXPECT_EQ(values_of<double>(responses[r].outputs[kProfile]),
              values_of<double>(expected[kProfile]));
  }
}

TEST(Batch, TheKeyAloneSharesNothing) {
  const Request first = with_key(make_request(1, 3, 1), "ann");
  Request other = with_key(with_user_of(first, make_request(1, 3, 2)), "ann");
  EXPECT_TRUE(have_same_user(manifest(), first, other));
  std::vector<float> history = values_of<float>(other.tensors[kHistory]);
  history.back() = -history.back();
  other.tensors[kHistory].data = history.data();
  EXPECT_FALSE(have_same_user(manifest(), first, other));
  const Batch run = batch(manifest(), {&first, &other});
  EXPECT_EQ(run.inputs.num_users, 2);
  EXPECT_EQ(run.places[1], (Placement{1, 1, 3, 3}));
  // Nor do equal rows without a key, or users among others.
  const Request nobody = make_request(1, 3, 1);
  EXPECT_FALSE(have_same_user(manifest(), nobody, nobody));
  const Request two = with_key(make_request(2, 3, 1), "ann");
  EXPECT_FALSE(have_same_user(manifest(), two, two));
}

TEST(Split, RefusesAnotherNumberOfOutputs) {
  const Request request = make_request(1, 2, 1);
  const Batch run = batch(manifest(), {&request});
  expect_contains(error_of([&] { split(manifest(), run, {}); }), "must be given 2 outputs; got 0");
}

// The outputs of a request alone.
std::vector<Tensor> run_alone(Session& session, const Request& request) {
  const Batch alone = batch(manifest(), {&request});
  return split(manifest(), alone, session.run(alone.inputs))[0].outputs;
}

TEST(Split, GivesEachRequestWhatItGetsAlone) {
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  const std::vector<std::vector<std::pair<int, int>>> mixes = {
      {{1, 5}}, {{1, 1}, {1, 2}, {1, 3}}, {{2, 7}, {1, 0}, {1, 9}}, {{1, 0}, {1, 0}}, {{4, 16}}};
  for (std::size_t mix = 0; mix < mixes.size(); ++mix) {
    std::vector<Request> requests;
    for (const auto& [users, candidates] : mixes[mix]) {
      const int seed = static_cast<int>(10 * mix + requests.size());
      requests.push_back(make_request(users, candidates, seed));
      if (users == 1 && seed % 2 == 1) {
        requests.back().tensors[kIndex] = TensorView{};
      }
    }
    const Batch run = batch(manifest(), pointers(requests));
    const std::vector<Response> responses = split(manifest(), run, session.run(run.inputs));
    ASSERT_EQ(responses.size(), requests.size());
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const std::vector<Tensor> alone = run_alone(session, requests[r]);
      const Response& merged = responses[r];
      EXPECT_EQ(merged.outputs[kScore].shape, (Shape{requests[r].num_candidates, 2}));
      EXPECT_EQ(merged.outputs[kProfile].shape, (Shape{requests[r].num_users, 2}));
      EXPECT_EQ(values_of<float>(merged.outputs[kScore]), values_of<float>(alone[kScore]));
      EXPECT_EQ(values_of<double>(merged.outputs[kProfile]), values_of<double>(alone[kProfile]));
    }
  }
}

TEST(Split, SharesTheStorageOfTheRun) {
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  const std::vector<Request> requests = {make_request(1, 2, 1), make_request(1, 3, 2)};
  const Batch run = batch(manifest(), pointers(requests));
  std::vector<Response> responses;
  std::vector<float> whole;
  {
    const std::vector<Tensor> outputs = session.run(run.inputs);
    whole = values_of<float>(outputs[kScore]);
    responses = split(manifest(), run, outputs);
    EXPECT_EQ(responses[0].outputs[kScore].data, outputs[kScore].data);
  }
  EXPECT_EQ(values_of<float>(responses[1].outputs[kScore]),
            std::vector<float>(whole.begin() + 4, whole.end()));
}

}  // namespace
}  // namespace ikbo::runtime::testing
