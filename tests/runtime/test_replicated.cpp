// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "fixtures.h"
#include "runtime/replicated.h"

namespace ikbo::runtime::testing {
namespace {

// manifest() as a package compiled without users has it: every input at the candidates' rows.
Manifest replicated_manifest() {
  Manifest replicated = manifest();
  replicated.inputs.pop_back();
  for (TensorSpec& spec : replicated.inputs) {
    spec.role = Role::kCandidate;
  }
  replicated.outputs.pop_back();
  replicated.max_users = 0;
  return replicated;
}

// Records what reaches it and answers through the stub.
class RecordingExecutor final : public Executor {
 public:
  std::vector<Tensor> run(const RunInputs& inputs) override {
    num_users = inputs.num_users;
    for (const TensorView& tensor : inputs.tensors) {
      shapes.push_back(tensor.shape);
    }
    return stub_->run(inputs);
  }

  std::int64_t num_users = -1;
  std::vector<Shape> shapes;

 private:
  std::shared_ptr<Executor> stub_ = make_stub_executor(replicated_manifest());
};

RunInputs inputs_of(const Request& request) {
  return {request.num_users, request.num_candidates, request.tensors};
}

TEST(Replicated, AnswersAsTheModelWithUsersDoes) {
  const Manifest seen = with_user_inputs(replicated_manifest(), {"age", "history"}, "m.pt2");
  const auto executor = std::make_shared<RecordingExecutor>();
  Session session(Model::with_executor(seen, make_replicating_executor(seen, executor)));
  Session with_users(Model::with_executor(manifest(), make_stub_executor(manifest())));

  const Request request = make_request(3, 7, 5);
  const std::vector<float> got = values_of<float>(session.run(inputs_of(request))[kScore]);
  const std::vector<float> want = values_of<float>(with_users.run(inputs_of(request))[kScore]);
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_FLOAT_EQ(got[i], want[i]) << "element " << i;
  }
  EXPECT_EQ(executor->num_users, 0);
  EXPECT_EQ(executor->shapes, (std::vector<Shape>{{7, 1}, {7, 3}, {7}, {7, 2}}));
}

TEST(Replicated, ClientsSeeUserInputsAndTheIndex) {
  const Manifest seen = with_user_inputs(replicated_manifest(), {"history", "age"}, "m.pt2");
  ASSERT_EQ(seen.inputs.size(), manifest().inputs.size());
  for (std::size_t i = 0; i < seen.inputs.size(); ++i) {
    EXPECT_EQ(seen.inputs[i].role, manifest().inputs[i].role) << seen.inputs[i].name;
  }
  EXPECT_EQ(seen.inputs[kIndex].name, "cand_to_user");
  EXPECT_EQ(seen.inputs[kIndex].dtype, DType::kInt32);
  EXPECT_EQ(seen.max_users, 16);
  Session session(Model::with_executor(
      seen, make_replicating_executor(seen, std::make_shared<RecordingExecutor>())));
  Request request = make_request(3, 7, 5);
  const std::vector<std::int32_t> index = {0, 1, 2, 3, 0, 1, 2};
  request.tensors[kIndex] = view_of(DType::kInt32, {7}, index);
  expect_contains(error_of([&] { session.run(inputs_of(request)); }),
                  "input cand_to_user must have values in [0, 2]; got 3 at position 3");
}

TEST(Replicated, RefusesWhatCannotBeReplicated) {
  expect_contains(error_of([] { with_user_inputs(manifest(), {"age"}, "m.pt2"); }),
                  "m.pt2: the inputs of a package to be replicated must all have a row for each "
                  "candidate; it takes user rows as they are (up to 4 users)");
  expect_contains(
      error_of([] { with_user_inputs(replicated_manifest(), {"age", "agee"}, "m.pt2"); }),
      "m.pt2: an input to be replicated must be one of the package's; it has no input agee");
  Manifest taken = replicated_manifest();
  taken.inputs[kItem].name = "cand_to_user";
  expect_contains(error_of([&] { with_user_inputs(taken, {"age"}, "m.pt2"); }),
                  "must not have an input of the index's name, cand_to_user");
}

}  // namespace
}  // namespace ikbo::runtime::testing
