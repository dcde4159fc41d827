// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <random>

#include "fixtures.h"
#include "ikbo/runtime/cut.h"
#include "runtime/executor.h"

namespace ikbo::runtime::testing {
namespace {

// manifest() without its limits: what runs a request whole.
Manifest unlimited() {
  Manifest wide = manifest();
  wide.max_users = wide.max_candidates = 1 << 20;
  return wide;
}

std::vector<Tensor> run_whole(const Request& request) {
  Session session(Model::with_executor(unlimited(), make_stub_executor(unlimited())));
  const Batch whole = batch(unlimited(), {&request});
  return session.run(whole.inputs);
}

void sort_index(Request& request) {
  auto* index = static_cast<std::int32_t*>(const_cast<void*>(request.tensors[kIndex].data));
  std::sort(index, index + request.num_candidates);
}

// Cuts, runs the parts in an order of `random`'s, joins, and compares with the run of the whole.
void expect_cut_equals_whole(const Request& request, std::int64_t max_users,
                             std::int64_t max_candidates, std::mt19937& random) {
  const CutRequest cut_request = cut(manifest(), request, max_users, max_candidates);
  const Manifest of_model = manifest();
  JoinedResponse joined(of_model, request.num_users, request.num_candidates);
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  std::vector<std::size_t> order(cut_request.parts.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t p : order) {
    const Request& part = cut_request.parts[p].request;
    EXPECT_LE(part.num_users, max_users);
    EXPECT_LE(part.num_candidates, max_candidates);
    check_request(manifest(), part);
    const Batch run = batch(manifest(), {&part});
    joined.add(cut_request, p, split(manifest(), run, session.run(run.inputs))[0]);
  }
  const std::vector<Tensor> expected = run_whole(request);
  const Response whole = joined.take();
  ASSERT_EQ(whole.outputs.size(), expected.size());
  EXPECT_EQ(whole.outputs[kScore].shape, expected[kScore].shape);
  EXPECT_EQ(values_of<float>(whole.outputs[kScore]), values_of<float>(expected[kScore]));
  EXPECT_EQ(whole.outputs[kProfile].shape, expected[kProfile].shape);
  EXPECT_EQ(values_of<double>(whole.outputs[kProfile]), values_of<double>(expected[kProfile]));
}

using Sizes = std::vector<std::pair<std::int64_t, std::int64_t>>;

Sizes sizes_of(const CutRequest& cut_request) {
  Sizes sizes;
  for (const RequestPart& part : cut_request.parts) {
    sizes.emplace_back(part.request.num_users, part.request.num_candidates);
  }
  return sizes;
}

TEST(Cut, RandomRequestsGiveWhatTheyGiveWhole) {
  std::mt19937 random(7);
  const auto pick = [&](int first, int last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(random);
  };
  for (int i = 0; i < 300; ++i) {
    Request request = make_request(pick(1, 20), pick(0, 80), i);
    if (i % 3 == 0) {
      sort_index(request);
    }
    if (request.num_users == 1 && i % 2 == 0) {
      request.tensors[kIndex] = TensorView{};
    }
    SCOPED_TRACE(i);
    expect_cut_equals_whole(request, pick(1, 4), pick(1, 16), random);
  }
}

TEST(Cut, OneUserIsCutIntoViews) {
  const Request request = make_request(1, 40, 1);
  const CutRequest cut_request = cut(manifest(), request, 4, 16);
  EXPECT_EQ(sizes_of(cut_request), (Sizes{{1, 16}, {1, 16}, {1, 8}}));
  EXPECT_EQ(cut_request.order, nullptr);
  for (const RequestPart& part : cut_request.parts) {
    EXPECT_EQ(part.request.tensors[kHistory].data, request.tensors[kHistory].data);
    EXPECT_EQ(
        part.request.tensors[kItem].data,
        static_cast<const std::byte*>(request.tensors[kItem].data) + part.first_candidate * 8);
  }
  EXPECT_EQ(cut_bytes(manifest(), request), 0u);
}

TEST(Cut, AUserGoesWithItsCandidates) {
  Request request = make_request(3, 9, 1);
  std::vector<std::int32_t> index = {2, 0, 1, 1, 0, 1, 1, 1, 2};
  request.tensors[kIndex].data = index.data();
  const CutRequest cut_request = cut(manifest(), request, 2, 4);
  // User 0 with two of user 1's candidates, then the other three with one of user 2's, then one.
  EXPECT_EQ(sizes_of(cut_request), (Sizes{{2, 4}, {2, 4}, {1, 1}}));
  EXPECT_EQ(cut_request.parts[1].first_user, 1);
  EXPECT_TRUE(cut_request.parts[1].goes_on && cut_request.parts[2].goes_on);
  EXPECT_EQ(values_of<std::int32_t>(cut_request.parts[1].request.tensors[kIndex]),
            (std::vector<std::int32_t>{0, 0, 0, 1}));
  EXPECT_EQ(*cut_request.order, (std::vector<std::int32_t>{1, 4, 2, 3, 5, 6, 7, 0, 8}));
}

TEST(Cut, UsersWithoutCandidatesFillParts) {
  EXPECT_EQ(sizes_of(cut(manifest(), make_request(9, 0, 1), 4, 16)),
            (Sizes{{4, 0}, {4, 0}, {1, 0}}));
}

TEST(Cut, WhatFitsIsOnePart) {
  EXPECT_EQ(sizes_of(cut(manifest(), make_request(4, 16, 1), 4, 16)), (Sizes{{4, 16}}));
  EXPECT_EQ(sizes_of(cut(manifest(), make_request(1, 0, 1), 4, 16)), (Sizes{{1, 0}}));
}

TEST(Cut, PartsKeepTheOwnerAndTheKey) {
  Request request = make_request(1, 40, 1);
  request.user_key = "ann";
  const std::weak_ptr<const void> owner = request.owner;
  CutRequest cut_request = cut(manifest(), request, 4, 16);
  request = Request{};
  const Request last = std::move(cut_request.parts.back().request);
  cut_request = CutRequest{};
  EXPECT_FALSE(owner.expired());
  EXPECT_EQ(last.user_key, "ann");
}

TEST(Cut, CountsBytes) {
  const Request request = make_request(2, 5, 1);
  // is_new, item, cand_to_user; score and profile.
  EXPECT_EQ(cut_bytes(manifest(), request), 5u * (1 + 8 + 4));
  EXPECT_EQ(output_bytes(manifest(), 2, 5), 5u * 8 + 2u * 16);
}

TEST(Cut, RefusesPartsWithoutRoom) {
  expect_contains(error_of([] { cut(manifest(), make_request(1, 1, 1), 1, 0); }),
                  "max_users and max_candidates must be at least 1; got 1 and 0");
}

}  // namespace
}  // namespace ikbo::runtime::testing
