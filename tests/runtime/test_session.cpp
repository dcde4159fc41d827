// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <thread>
#include <utility>

#include "fixtures.h"
#include "runtime/executor.h"

namespace ikbo::runtime::testing {
namespace {

RunInputs inputs_of(const Request& request) {
  return {request.num_users, request.num_candidates, request.tensors};
}

// Records what reaches it and answers through the stub.
class RecordingExecutor final : public Executor {
 public:
  std::vector<Tensor> run(const RunInputs& inputs) override {
    seen.push_back(inputs);
    std::vector<Tensor> outputs = stub_->run(inputs);
    if (spoil) {
      spoil(outputs);
    }
    return outputs;
  }

  std::vector<RunInputs> seen;
  std::function<void(std::vector<Tensor>&)> spoil;

 private:
  std::shared_ptr<Executor> stub_ = make_stub_executor(manifest());
};

// U = 2, B = 3 with numbers small enough to add up by hand.
struct HandMade {
  std::vector<std::int64_t> age = {10, 20};
  std::vector<float> history = {1, 2, 3, 4, 5, 6};
  std::vector<std::uint8_t> is_new = {1, 0, 1};
  std::vector<float> item = {100, 200, 300, 400, 500, 600};
  std::vector<std::int32_t> index = {1, 0, 1};

  RunInputs inputs() const {
    return {2,
            3,
            {view_of(DType::kInt64, {2, 1}, age), view_of(DType::kFloat32, {2, 3}, history),
             view_of(DType::kBool, {3}, is_new), view_of(DType::kFloat32, {3, 2}, item),
             view_of(DType::kInt32, {3}, index)}};
  }
};

TEST(Session, RunsOnTheStub) {
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  const HandMade made;
  const std::vector<Tensor> outputs = session.run(made.inputs());
  ASSERT_EQ(outputs.size(), 2U);
  EXPECT_EQ(outputs[kScore].shape, (Shape{3, 2}));
  EXPECT_EQ(values_of<float>(outputs[kScore]),
            (std::vector<float>{336, 337, 716, 717, 1136, 1137}));
  EXPECT_EQ(values_of<double>(outputs[kProfile]), (std::vector<double>{16, 17, 35, 36}));
}

TEST(Session, RunsOnAnExecutorOfItsOwnWhereThereIsOne) {
  class Streams final : public Executor {
   public:
    std::vector<Tensor> run(const RunInputs&) override {
      ADD_FAILURE() << "a session's run must reach the session's executor";
      return {};
    }
    std::shared_ptr<Executor> for_session() override {
      sessions.push_back(std::make_shared<RecordingExecutor>());
      return sessions.back();
    }
    std::vector<std::shared_ptr<RecordingExecutor>> sessions;
  };
  const auto streams = std::make_shared<Streams>();
  const std::shared_ptr<const Model> model = Model::with_executor(manifest(), streams);
  Session first(model);
  Session second(model);
  second.run(HandMade().inputs());
  ASSERT_EQ(streams->sessions.size(), 2U);
  EXPECT_TRUE(streams->sessions[0]->seen.empty());
  EXPECT_EQ(streams->sessions[1]->seen.size(), 1U);
}

TEST(Session, RefusesAnAbsentIndex) {
  Session session(Model::with_executor(manifest(), make_stub_executor(manifest())));
  Request request = make_request(1, 2, 1);
  request.tensors[kIndex] = TensorView{};
  expect_contains(error_of([&] { session.run(inputs_of(request)); }),
                  "input cand_to_user must be given; got none");
}

TEST(Session, GivesTheExecutorAlignedTensorsOnly) {
  const auto executor = std::make_shared<RecordingExecutor>();
  Session session(Model::with_executor(manifest(), executor));
  const Request request = make_request(2, 5, 1);
  const std::vector<float> want = values_of<float>(session.run(inputs_of(request))[kScore]);

  RunInputs shifted = inputs_of(request);
  std::vector<std::vector<std::byte>> storage;
  for (TensorView& tensor : shifted.tensors) {
    storage.emplace_back(tensor.bytes + 1);
    std::memcpy(storage.back().data() + 1, tensor.data, tensor.bytes);
    tensor.data = storage.back().data() + 1;
  }
  EXPECT_EQ(values_of<float>(session.run(shifted)[kScore]), want);
  ASSERT_EQ(executor->seen.size(), 2U);
  for (std::size_t i = 0; i < request.tensors.size(); ++i) {
    const void* aligned = executor->seen[0].tensors[i].data;
    EXPECT_EQ(aligned, request.tensors[i].data) << "an aligned input was copied";
    const auto address = reinterpret_cast<std::uintptr_t>(executor->seen[1].tensors[i].data);
    EXPECT_EQ(address % size_of(request.tensors[i].dtype), 0U);
  }
}

TEST(Session, ComputesUserOutputsWithoutCandidates) {
  const auto executor = std::make_shared<RecordingExecutor>();
  Session session(Model::with_executor(manifest(), executor));
  const std::vector<Tensor> outputs = session.run(inputs_of(make_request(3, 0, 4)));
  ASSERT_EQ(outputs.size(), 2U);
  EXPECT_EQ(outputs[kScore].shape, (Shape{0, 2}));
  EXPECT_EQ(outputs[kScore].bytes, 0U);
  EXPECT_EQ(outputs[kScore].dtype, DType::kFloat32);
  const std::vector<Tensor> with_candidates = session.run(inputs_of(make_request(3, 2, 4)));
  EXPECT_EQ(values_of<double>(outputs[kProfile]), values_of<double>(with_candidates[kProfile]));
  EXPECT_EQ(executor->seen[0].num_candidates, 1);
}

TEST(Session, RunsNothingWithoutCandidatesAndUserOutputs) {
  Manifest no_profile = manifest();
  no_profile.outputs.pop_back();
  const auto executor = std::make_shared<RecordingExecutor>();
  Session session(Model::with_executor(no_profile, executor));
  const std::vector<Tensor> outputs = session.run(inputs_of(make_request(3, 0, 4)));
  ASSERT_EQ(outputs.size(), 1U);
  EXPECT_EQ(outputs[kScore].shape, (Shape{0, 2}));
  EXPECT_TRUE(executor->seen.empty());
}

TEST(Session, ChecksWhatTheCompiledCodeReturns) {
  const auto executor = std::make_shared<RecordingExecutor>();
  Session session(Model::with_executor(manifest(), executor));
  const Request request = make_request(2, 5, 1);
  executor->spoil = [](std::vector<Tensor>& outputs) { outputs.pop_back(); };
  expect_contains(error_of([&] { session.run(inputs_of(request)); }),
                  "the compiled code must return 2 outputs; got 1");
  executor->spoil = [](std::vector<Tensor>& outputs) { outputs[kScore].shape[0] = 4; };
  expect_contains(error_of([&] { session.run(inputs_of(request)); }),
                  "output score must be float32 [5, 2] as the manifest says; the compiled code "
                  "returned float32 [4, 2]");
  executor->spoil = [](std::vector<Tensor>& outputs) { outputs[kProfile].dtype = DType::kInt64; };
  expect_contains(error_of([&] { session.run(inputs_of(request)); }),
                  "the compiled code returned int64 [2, 2]");
}

TEST(Session, ServesAPackageWithoutUsers) {
  const std::string json = R"({
    "format_version": 1, "model": {"name": "replicated", "version": "1"},
    "torch_version": "2.11.0", "device": "cpu",
    "inputs": [{"name": "x", "dtype": "int32", "shape": [-1], "role": "candidate"}],
    "outputs": [{"name": "y", "dtype": "int64", "shape": [-1], "role": "candidate"}],
    "max_users": 0, "max_candidates": 8, "ops": [], "replay": []})";
  const Manifest parsed = parse_manifest(json, "m");
  Session session(Model::with_executor(parsed, make_stub_executor(parsed)));
  const std::vector<std::int32_t> x = {3, 1, 2};
  const RunInputs inputs{0, 3, {view_of(DType::kInt32, {3}, x)}};
  EXPECT_EQ(values_of<std::int64_t>(session.run(inputs)[0]), (std::vector<std::int64_t>{3, 1, 2}));
  expect_contains(error_of([&] { session.run({1, 3, inputs.tensors}); }),
                  "the number of users must be in [0, 0]; got 1");
}

TEST(Session, SharesOneModelBetweenThreads) {
  const auto model = Model::with_executor(manifest(), make_stub_executor(manifest()));
  const Request request = make_request(2, 16, 1);
  const std::vector<float> want = values_of<float>(Session(model).run(inputs_of(request))[kScore]);
  std::vector<std::vector<float>> got(4);
  std::vector<std::thread> threads;
  threads.reserve(got.size());
  for (std::vector<float>& mine : got) {
    threads.emplace_back([&model, &request, &mine] {
      Session session(model);
      for (int i = 0; i < 50; ++i) {
        mine = values_of<float>(session.run(inputs_of(request))[kScore]);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::vector<float>& mine : got) {
    EXPECT_EQ(mine, want);
  }
}

}  // namespace
}  // namespace ikbo::runtime::testing
