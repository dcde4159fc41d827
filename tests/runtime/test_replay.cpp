// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "fixtures.h"
#include "runtime/archive.h"
#include "runtime/executor.h"
#include "runtime/replay.h"

namespace ikbo::runtime::testing {
namespace {

constexpr const char* kCase =
    R"("replay": [{"id": "two", "num_users": 2, "num_candidates": 3,
       "inputs": ["replay/age", "replay/history", "replay/is_new", "replay/item", "replay/index"],
       "outputs": ["replay/score", "replay/profile"], "atol": 0.25, "rtol": 0, "kernels": []}])";

std::string text_of(const void* data, std::size_t bytes) {
  return {static_cast<const char*>(data), bytes};
}

// A package around make_request(2, 3, 5) and the stub's answer to it.
std::map<std::string, std::string> entries() {
  const Request request = make_request(2, 3, 5);
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  const std::vector<Tensor> outputs = session.run({2, 3, request.tensors});
  const std::vector<std::string> names = {"age", "history", "is_new", "item", "index"};
  std::map<std::string, std::string> result;
  result["m/extra/ikbo/manifest.json"] = replaced(manifest_json(), R"("replay": [])", kCase);
  for (std::size_t i = 0; i < names.size(); ++i) {
    result["m/extra/ikbo/replay/" + names[i]] =
        text_of(request.tensors[i].data, request.tensors[i].bytes);
  }
  result["m/extra/ikbo/replay/score"] = text_of(outputs[kScore].data, outputs[kScore].bytes);
  result["m/extra/ikbo/replay/profile"] = text_of(outputs[kProfile].data, outputs[kProfile].bytes);
  return result;
}

ReplayResult replay_entries(const std::map<std::string, std::string>& entries) {
  const std::vector<std::byte> bytes = archive_bytes(entries);
  const Package package = Package::from_archive(Archive::open_memory(bytes, "memory.pt2"));
  Session session(Model::with_executor(package.manifest(), make_stub_executor(package.manifest())));
  return replay(package, session, package.manifest().replay.at(0));
}

// Adds `amount` to the element of a stored tensor.
template <typename T>
void shift(std::string& bytes, std::size_t position, T amount) {
  T value;
  std::memcpy(&value, bytes.data() + position * sizeof(T), sizeof(T));
  value += amount;
  std::memcpy(bytes.data() + position * sizeof(T), &value, sizeof(T));
}

TEST(Replay, PassesOnTheSameOutputs) {
  const ReplayResult result = replay_entries(entries());
  EXPECT_TRUE(result.passed());
  EXPECT_EQ(result.worst.error, 0);
}

TEST(Replay, ReportsTheWorstErrorWithinTolerance) {
  auto shifted = entries();
  shift<double>(shifted["m/extra/ikbo/replay/profile"], 2, 0.125);
  const ReplayResult result = replay_entries(shifted);
  EXPECT_TRUE(result.passed());
  EXPECT_EQ(result.worst_output, "profile");
  EXPECT_EQ(result.worst.position, 2U);
  EXPECT_EQ(result.worst.error, 0.125);
  EXPECT_EQ(result.worst.allowed, 0.25);
}

TEST(Replay, FailsBeyondTolerance) {
  auto shifted = entries();
  shift<float>(shifted["m/extra/ikbo/replay/score"], 5, 1);
  const ReplayResult result = replay_entries(shifted);
  ASSERT_EQ(result.failures.size(), 1U);
  expect_contains(result.failures[0], "output score must be within 0.25 of ");
  expect_contains(result.failures[0], "at element 5");
}

TEST(Replay, FailsWhereTheRunRefusesItsInputs) {
  auto broken = entries();
  shift<std::int32_t>(broken["m/extra/ikbo/replay/index"], 0, 7);
  const ReplayResult result = replay_entries(broken);
  ASSERT_EQ(result.failures.size(), 1U);
  expect_contains(result.failures[0], "input cand_to_user must have values in [0, 1]");
}

TEST(Replay, FailsWhereANamedKernelDidNotRun) {
  auto named = entries();
  std::string& json = named["m/extra/ikbo/manifest.json"];
  json = replaced(json, R"("kernels": [])", R"("kernels": [{"op": "lce", "kernel": "gemm"}])");
  const ReplayResult result = replay_entries(named);
  ASSERT_EQ(result.failures.size(), 1U);
  expect_contains(result.failures[0], "lce must run kernel gemm");
}

TEST(Replay, RefusesAStoredTensorOfOtherSize) {
  auto shorter = entries();
  shorter["m/extra/ikbo/replay/item"].pop_back();
  expect_contains(error_of([&] { replay_entries(shorter); }),
                  "memory.pt2: entry replay/item must have 24 bytes (3 rows of item); got 23");
  shorter.erase("m/extra/ikbo/replay/item");
  expect_contains(error_of([&] { replay_entries(shorter); }), "replay/item\" is missing");
}

}  // namespace
}  // namespace ikbo::runtime::testing
