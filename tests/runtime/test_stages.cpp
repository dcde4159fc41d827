// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <thread>
#include <utility>

#include "fixtures.h"
#include "runtime/stages.h"

namespace ikbo::runtime::testing {
namespace {

// manifest() in two stages: the state is sum [U, 2] float32 and code [U] int64; candidates read
// the input age as well.
Manifest staged_manifest() {
  const std::string version =
      replaced(manifest_json(), R"("format_version": 1)", R"("format_version": 2)");
  return parse_manifest(replaced(version, R"("ops": [])", R"("user_stage": {"state": [
      {"name": "sum", "dtype": "float32", "shape": [-1, 2], "role": "user"},
      {"name": "code", "dtype": "int64", "shape": [-1], "role": "user"}], "passed": ["age"]},
    "ops": [])"),
                        "manifest");
}

RunInputs inputs_of(const Request& request) {
  return {request.num_users, request.num_candidates, request.tensors};
}

// A stage on the stub that keeps what reached it. `shift` is added to each float that it returns.
class Stage final : public Executor {
 public:
  explicit Stage(const Manifest& stage) : stub_(make_stub_executor(stage)) {}

  std::vector<Tensor> run(const RunInputs& inputs) override {
    runs.push_back(inputs.num_users);
    tensors.clear();
    for (const TensorView& tensor : inputs.tensors) {
      tensors.push_back(values_of<std::byte>(tensor));
    }
    std::vector<Tensor> outputs = stub_->run(inputs);
    if (change) {
      change(outputs);
    }
    return outputs;
  }

  std::vector<std::int64_t> runs;               // users of each
  std::vector<std::vector<std::byte>> tensors;  // bytes of the last
  std::function<void(std::vector<Tensor>&)> change;

 private:
  std::shared_ptr<Executor> stub_;
};

class Stages : public ::testing::Test {
 protected:
  // A session of a newly loaded model.
  Session load(const std::shared_ptr<UserStateCache>& cache) {
    const Manifest manifest = staged_manifest();
    std::shared_ptr<UserStates> states;
    if (cache != nullptr) {
      states = std::make_shared<UserStates>(cache, manifest);
    }
    return Session(model_ = Model::with_executor(
                       manifest, make_staged_executor(manifest, users_, candidates_, states)));
  }

  // What the model answers without a cache.
  std::vector<Tensor> expected(const Request& request) {
    const Manifest manifest = staged_manifest();
    Session session(Model::with_executor(
        manifest, make_staged_executor(manifest, make_stub_executor(user_stage_of(manifest)),
                                       make_stub_executor(candidate_stage_of(manifest)), nullptr)));
    return session.run(inputs_of(request));
  }

  void expect_answer(Session& session, const Request& request,
                     const std::vector<std::string>& keys = {}) {
    RunInputs inputs = inputs_of(request);
    inputs.user_keys = keys;
    const std::vector<Tensor> got = session.run(inputs);
    const std::vector<Tensor> want = expected(request);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].shape, want[i].shape);
      EXPECT_EQ(values_of<std::byte>(got[i]), values_of<std::byte>(want[i])) << "output " << i;
    }
  }

  std::shared_ptr<UserStateCache> cache_ =
      std::make_shared<UserStateCache>(UserCacheOptions{std::size_t{1} << 20, {}});
  std::shared_ptr<Stage> users_ = std::make_shared<Stage>(user_stage_of(staged_manifest()));
  std::shared_ptr<Stage> candidates_ =
      std::make_shared<Stage>(candidate_stage_of(staged_manifest()));
  std::shared_ptr<const Model> model_;
};

using Sizes = std::vector<std::int64_t>;

// Two requests' rows in one, users and candidates one behind the other.
Request merged(const Request& a, const Request& b) {
  const Batch run = batch(staged_manifest(), {&a, &b});
  return {run.inputs.num_users, run.inputs.num_candidates, run.inputs.tensors,
          std::make_shared<Batch>(run)};
}

TEST(StagedManifest, SaysWhatEachStageTakesAndReturns) {
  const auto names = [](const std::vector<TensorSpec>& specs) {
    std::vector<std::string> all;
    for (const TensorSpec& spec : specs) {
      all.push_back(spec.name);
    }
    return all;
  };
  using Names = std::vector<std::string>;
  const Manifest users = user_stage_of(staged_manifest());
  EXPECT_EQ(names(users.inputs), (Names{"age", "history"}));
  EXPECT_EQ(names(users.outputs), (Names{"sum", "code"}));
  EXPECT_FALSE(users.user_stage.has_value());
  const Manifest candidates = candidate_stage_of(staged_manifest());
  EXPECT_EQ(names(candidates.inputs),
            (Names{"age", "is_new", "item", "cand_to_user", "sum", "code"}));
  EXPECT_EQ(names(candidates.outputs), (Names{"score", "profile"}));
}

TEST(StagedBatch, SaysWhoItsUsersAre) {
  const Manifest staged = staged_manifest();
  Request two = make_request(2, 3, 1);
  Request ann = make_request(1, 3, 2);
  ann.user_key = "ann";
  Request ann_again = ann;
  Request bob = make_request(1, 0, 3);
  bob.user_key = "bob";
  using Keys = std::vector<std::string>;
  EXPECT_EQ(batch(staged, {&two, &ann, &ann_again, &bob}).inputs.user_keys,
            (Keys{"", "", "ann", "bob"}));
  EXPECT_EQ(batch(staged, {&ann}).inputs.user_keys, (Keys{"ann"}));
  EXPECT_TRUE(batch(manifest(), {&ann}).inputs.user_keys.empty()) << "nobody would read them";
}

TEST_F(Stages, RunOneAfterTheOtherWithoutACache) {
  Session session = load(nullptr);
  const Request request = make_request(3, 7, 1);
  const std::vector<Tensor> outputs = session.run(inputs_of(request));
  EXPECT_EQ(model_->user_cache_counts(), nullptr);
  EXPECT_EQ(users_->runs, (Sizes{3}));
  EXPECT_EQ(candidates_->runs, (Sizes{3}));
  // By hand: the user stage's sums and their elements' numbers, then the candidate stage's of
  // those.
  const auto age = values_of<std::int64_t>(request.tensors[kAge]);
  const auto history = values_of<float>(request.tensors[kHistory]);
  const auto profile = values_of<double>(outputs[kProfile]);
  for (std::size_t u = 0; u < 3; ++u) {
    const double sum =
        static_cast<double>(age[u]) + history[3 * u] + history[3 * u + 1] + history[3 * u + 2];
    const double of_state = sum + (sum + 1) + sum;
    EXPECT_EQ(profile[2 * u], static_cast<double>(age[u]) + of_state);
  }
}

TEST_F(Stages, ASecondRequestOfAUserSkipsTheUserStage) {
  Session session = load(cache_);
  const Request first = make_request(1, 5, 1);
  expect_answer(session, first);
  const std::vector<std::vector<std::byte>> seen = candidates_->tensors;
  expect_answer(session, first);
  EXPECT_EQ(candidates_->tensors, seen);
  Request other_candidates = make_request(1, 9, 2);
  other_candidates.tensors[kAge] = first.tensors[kAge];
  other_candidates.tensors[kHistory] = first.tensors[kHistory];
  expect_answer(session, other_candidates);
  EXPECT_EQ(users_->runs, (Sizes{1}));
  EXPECT_EQ(candidates_->runs, (Sizes{1, 1, 1}));
  EXPECT_EQ(model_->user_cache_counts()->hits, 2U);
  EXPECT_EQ(model_->user_cache_counts()->misses, 1U);
}

TEST_F(Stages, GiveTheBytesThatTheUserStageWrote) {
  Session session = load(cache_);
  int runs = 0;
  // A stage that returns something else each time, as one with other batch mates may by rounding.
  users_->change = [&](std::vector<Tensor>& outputs) {
    ++runs;
    for (Tensor& output : outputs) {
      const std::shared_ptr<std::byte[]> block(new std::byte[output.bytes]);
      for (std::size_t i = 0; i < output.bytes; ++i) {
        block[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(runs) * 7);
      }
      output.owner = block;
      output.data = block.get();
    }
  };
  const Request ann = make_request(1, 2, 1);
  const Request bob = make_request(1, 2, 2);
  session.run(inputs_of(merged(ann, bob)));
  const std::vector<std::vector<std::byte>> together = candidates_->tensors;
  session.run(inputs_of(ann));
  for (std::size_t state : {4, 5}) {
    const std::size_t row = together[state].size() / 2;
    EXPECT_EQ(candidates_->tensors[state],
              std::vector<std::byte>(together[state].begin(), together[state].begin() + row));
  }
  session.run(inputs_of(merged(bob, ann)));
  for (std::size_t state : {4, 5}) {
    std::vector<std::byte> swapped = together[state];
    std::rotate(swapped.begin(), swapped.begin() + swapped.size() / 2, swapped.end());
    EXPECT_EQ(candidates_->tensors[state], swapped);
  }
  EXPECT_EQ(runs, 1);
}

TEST_F(Stages, RunTheUserStageForTheUsersThatMiss) {
  Session session = load(cache_);
  const Request two = make_request(2, 6, 1);
  const Request one = make_request(1, 3, 5);
  expect_answer(session, one);
  expect_answer(session, merged(two, one));
  expect_answer(session, merged(one, two));
  EXPECT_EQ(users_->runs, (Sizes{1, 2}));
  EXPECT_EQ(users_->tensors[kHistory], values_of<std::byte>(two.tensors[kHistory]));
  EXPECT_EQ(candidates_->runs, (Sizes{1, 3, 3}));
  EXPECT_EQ(model_->user_cache_counts()->hits, 4U);
  EXPECT_EQ(model_->user_cache_counts()->misses, 3U);
}

TEST_F(Stages, AChangedByteMisses) {
  Session session = load(cache_);
  const Request request = make_request(1, 4, 1);
  expect_answer(session, request, {"ann"});
  std::size_t runs = 1;
  for (const std::size_t input : {kAge, kHistory}) {
    std::vector<std::byte> bytes = values_of<std::byte>(request.tensors[input]);
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      if (input == kAge && at > 0) {
        break;  // ages end at 120
      }
      bytes[at] ^= std::byte{1};
      Request changed = request;
      changed.tensors[input].data = bytes.data();
      expect_answer(session, changed, {"ann"});
      EXPECT_EQ(users_->runs.size(), ++runs) << "input " << input << " byte " << at;
      bytes[at] ^= std::byte{1};
    }
  }
  expect_answer(session, request, {"ann"});
  EXPECT_EQ(users_->runs.size(), runs) << "what was there first is there still";
}

TEST_F(Stages, KeysTellUsersOfTheSameContentApart) {
  Session session = load(cache_);
  const Request request = make_request(1, 4, 1);
  for (const std::string key : {"ann", "bob", ""}) {
    expect_answer(session, request, {key});
    expect_answer(session, request, {key});
  }
  expect_answer(session, request);  // without keys: as with an empty one
  EXPECT_EQ(users_->runs, (Sizes{1, 1, 1}));
  const Request other = make_request(1, 2, 3);
  expect_answer(session, merged(other, request), {"", "bob"});
  EXPECT_EQ(users_->runs, (Sizes{1, 1, 1, 1})) << "the second user alone is known";
}

TEST_F(Stages, AModelThatIsLoadedAgainFindsNothingOfBefore) {
  Session before = load(cache_);
  const Request request = make_request(2, 4, 1);
  expect_answer(before, request);
  const std::size_t used = cache_->used_bytes();
  Session after = load(cache_);
  expect_answer(after, request);
  EXPECT_EQ(users_->runs, (Sizes{2, 2}));
  EXPECT_EQ(cache_->used_bytes(), 2 * used);
  before = load(nullptr);
  EXPECT_EQ(cache_->used_bytes(), used) << "its states end with the model";
}

TEST_F(Stages, AMadeUpRunLeavesTheCacheAlone) {
  Session session = load(cache_);
  const Request request = make_request(2, 4, 1);
  RunInputs inputs = inputs_of(request);
  inputs.bypasses_user_cache = true;
  session.run(inputs);
  session.run(inputs);
  EXPECT_EQ(users_->runs, (Sizes{2, 2}));
  EXPECT_EQ(model_->user_cache_counts()->misses, 0U);
  EXPECT_EQ(cache_->used_bytes(), 0U);
}

TEST_F(Stages, AnswerWhateverTheCacheHasRoomFor) {
  for (const std::size_t max_bytes : {std::size_t{1}, std::size_t{500}, std::size_t{1500}}) {
    const auto small = std::make_shared<UserStateCache>(UserCacheOptions{max_bytes, {}});
    Session session = load(small);
    for (int seed = 0; seed < 6; ++seed) {
      const Request request = make_request(1 + seed % 4, 7, seed % 4);
      expect_answer(session, request);
      expect_answer(session, request);
      EXPECT_LE(small->used_bytes(), max_bytes);
    }
  }
}

TEST_F(Stages, ComputeUserOutputsWithoutCandidates) {
  Session session = load(cache_);
  const Request request = make_request(3, 0, 4);
  expect_answer(session, request);
  expect_answer(session, request);
  EXPECT_EQ(users_->runs, (Sizes{3}));
}

TEST_F(Stages, CheckWhatTheUserStageReturns) {
  Session session = load(cache_);
  const Request request = make_request(2, 5, 1);
  users_->change = [](std::vector<Tensor>& outputs) { outputs[0].shape[1] = 3; };
  expect_contains(error_of([&] { session.run(inputs_of(request)); }),
                  "output sum must be float32 [2, 2] as the manifest says; the compiled code "
                  "returned float32 [2, 3]");
  EXPECT_EQ(cache_->used_bytes(), 0U);
  users_->change = nullptr;
  expect_answer(session, request);
}

TEST_F(Stages, AFailedUserStageIsNotKept) {
  Session session = load(cache_);
  const Request request = make_request(2, 5, 1);
  users_->change = [](std::vector<Tensor>&) { IKBO_CHECK(false, "out of order"); };
  expect_contains(error_of([&] { session.run(inputs_of(request)); }), "out of order");
  users_->change = nullptr;
  expect_answer(session, request);
  EXPECT_EQ(users_->runs, (Sizes{2, 2}));
}

TEST_F(Stages, SessionsOnThreadsShareTheCache) {
  const Manifest manifest = staged_manifest();
  const auto model = Model::with_executor(
      manifest, make_staged_executor(
                    manifest, make_stub_executor(user_stage_of(manifest)),
                    make_stub_executor(candidate_stage_of(manifest)),
                    std::make_shared<UserStates>(
                        std::make_shared<UserStateCache>(UserCacheOptions{3000, {}}), manifest)));
  std::vector<Request> requests;
  std::vector<std::vector<float>> want;
  for (int seed = 0; seed < 12; ++seed) {
    requests.push_back(make_request(1 + seed % 3, 16, seed));
    want.push_back(values_of<float>(expected(requests.back())[kScore]));
  }
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < wrong.size(); ++thread) {
    threads.emplace_back([&, thread] {
      Session session(model);
      for (std::size_t i = 0; i < 200; ++i) {
        const std::size_t number = (i * 5 + thread) % requests.size();
        const auto got = values_of<float>(session.run(inputs_of(requests[number]))[kScore]);
        wrong[thread] += got == want[number] ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
  EXPECT_GT(model->user_cache_counts()->hits, 0U);
}

TEST(StagedSession, HasExecutorsOfItsOwnWhereThereAre) {
  class Streams final : public Executor {
   public:
    explicit Streams(const Manifest& stage) : stage_(stage) {}
    std::vector<Tensor> run(const RunInputs&) override {
      ADD_FAILURE() << "a session's run must reach the session's executor";
      return {};
    }
    std::shared_ptr<Executor> for_session() override { return make_stub_executor(stage_); }

   private:
    Manifest stage_;
  };
  const Manifest manifest = staged_manifest();
  const auto cache = std::make_shared<UserStateCache>(UserCacheOptions{std::size_t{1} << 20, {}});
  const auto model = Model::with_executor(
      manifest, make_staged_executor(manifest, std::make_shared<Streams>(user_stage_of(manifest)),
                                     std::make_shared<Streams>(candidate_stage_of(manifest)),
                                     std::make_shared<UserStates>(cache, manifest)));
  const Request request = make_request(2, 3, 1);
  Session(model).run(inputs_of(request));
  Session(model).run(inputs_of(request));
  EXPECT_EQ(model->user_cache_counts()->hits, 2U);
}

}  // namespace
}  // namespace ikbo::runtime::testing
