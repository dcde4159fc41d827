// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <optional>

#include "runtime/executor.h"
#include "runtime/fixtures.h"
#include "server/background.h"
#include "server/model_repository.h"

namespace ikbo::server {
namespace {

using runtime::testing::archive_bytes;
using runtime::testing::expect_contains;
using runtime::testing::make_request;
using runtime::testing::replaced;
using runtime::testing::TempFolder;
using std::chrono::milliseconds;

constexpr std::chrono::seconds kLong{30};  // longer than anything here takes

// The stub executor, with a test's say before each run.
class HookedExecutor final : public runtime::Executor {
 public:
  HookedExecutor(const runtime::Manifest& manifest, std::function<void()> hook)
      : stub_(runtime::make_stub_executor(manifest)), hook_(std::move(hook)) {}

  std::vector<runtime::Tensor> run(const runtime::RunInputs& inputs) override {
    hook_();
    return stub_->run(inputs);
  }

 private:
  const std::shared_ptr<Executor> stub_;
  const std::function<void()> hook_;
};

// Holds back who passes while it is closed.
class Gate {
 public:
  void set_open(bool is_open) {
    is_open_ = is_open;
    is_open_.notify_all();
  }
  void pass() {
    ++waiting_;
    is_open_.wait(false);
    --waiting_;
  }
  void wait_until_someone_waits() const {
    while (waiting_ == 0) {
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<bool> is_open_ = true;
  std::atomic<int> waiting_ = 0;
};

class ModelRepositoryTest : public ::testing::Test {
 protected:
  static std::vector<std::byte> package(const std::string& name, const std::string& version) {
    const std::string json =
        replaced(runtime::testing::manifest_json(), R"("name": "ranker", "version": "3")",
                 R"("name": ")" + name + R"(", "version": ")" + version + '"');
    return archive_bytes({{"model/extra/ikbo/manifest.json", json}});
  }

  // Puts a package in place as an operator should: written elsewhere, then renamed.
  std::string write(const std::string& file, const std::string& name, const std::string& version) {
    const std::string from = folder_.write(file + ".tmp", package(name, version));
    const std::string to = from.substr(0, from.size() - 4);
    std::filesystem::rename(from, to);
    return to;
  }

  std::string path() const { return folder_.path(); }

  ModelRepository& start(PackageSources sources, bool allows_changes = true) {
    RepositoryOptions options;
    options.sources = std::move(sources);
    options.open = [](const std::string& path) { return runtime::Package::open(path); };
    options.load = [this](const runtime::Package& package) {
      ++num_loads_;
      const runtime::Manifest& manifest = package.manifest();
      load_(manifest.model_version);
      return runtime::Model::with_executor(
          manifest, std::make_shared<HookedExecutor>(
                        manifest, [this, version = manifest.model_version] { run_(version); }));
    };
    options.allows_changes = allows_changes;
    options.first_delay = milliseconds(20);
    options.max_delay = milliseconds(80);
    repository_.emplace(std::move(options), models_, background_, logger_);
    repository_->load_all();
    return *repository_;
  }

  std::optional<RequestError> wait_for(void (ModelRepository::*change)(const std::string&,
                                                                       ModelRepository::Done),
                                       const std::string& name) {
    std::promise<std::optional<RequestError>> promise;
    ((*repository_).*change)(name, [&](const auto& error) { promise.set_value(error); });
    return promise.get_future().get();
  }
  std::optional<RequestError> load(const std::string& name) {
    return wait_for(&ModelRepository::load, name);
  }
  std::optional<RequestError> unload(const std::string& name) {
    return wait_for(&ModelRepository::unload, name);
  }

  std::future<Batcher::Outcome> submit(const ServedModels::Handle& model) {
    auto promise = std::make_shared<std::promise<Batcher::Outcome>>();
    auto future = promise->get_future();
    model->submit(make_request(1, 2, 1),
                  [model = ServedModels::Handle(model), promise](Batcher::Outcome outcome) mutable {
                    model.reset();  // the test may end with the answer, and Background with it
                    promise->set_value(std::move(outcome));
                  },
                  {});
    return future;
  }

  static bool is_answered(std::future<Batcher::Outcome> future) {
    EXPECT_EQ(future.wait_for(kLong), std::future_status::ready);
    return std::holds_alternative<runtime::Response>(future.get());
  }

  // "ranker 3 READY (reason)", a line for each entry.
  std::string index(bool ready_only = false) const {
    std::string text;
    for (const IndexEntry& entry : repository_->index(ready_only)) {
      text += entry.name + " " + entry.version + " " + std::string(entry.state);
      text += entry.reason.empty() ? "\n" : " (" + entry.reason + ")\n";
    }
    return text;
  }

  template <typename Condition>
  static void wait_until(const Condition& holds) {
    const auto deadline = Background::Clock::now() + kLong;
    while (!holds()) {
      ASSERT_LT(Background::Clock::now(), deadline);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  TempFolder folder_;
  Logger logger_{LogLevel::kError};
  std::atomic<int> num_loads_ = 0;
  std::function<void(const std::string&)> load_ = [](const std::string&) {};
  std::function<void(const std::string&)> run_ = [](const std::string&) {};
  Background background_;
  ServedModels models_{background_};
  std::optional<ModelRepository> repository_;
};

// As Kubernetes lays out its volumes, and with links that lead back.
TEST_F(ModelRepositoryTest, FindsAPackageOnceWhateverLinksLeadThere) {
  namespace fs = std::filesystem;
  const fs::path root = path();
  const std::string file = write("a.pt2", "ranker", "1");
  fs::create_directory(root / "..2026");
  fs::rename(file, root / "..2026" / "a.pt2");
  fs::create_directory_symlink("..2026", root / "..data");
  fs::create_symlink("..data/a.pt2", root / "a.pt2");
  fs::create_directory_symlink(".", root / "loop");
  fs::create_directory_symlink("..", root / "..2026" / "loop");
  fs::create_symlink("nowhere", root / "dangling.pt2");
  start({{}, {path()}});
  EXPECT_EQ(index(), "ranker 1 READY\n");
  EXPECT_EQ(load("ranker"), std::nullopt);
  EXPECT_EQ(num_loads_, 1);
}

TEST_F(ModelRepositoryTest, ServesWhatTheSourcesNameTheLatestVersionFirst) {
  const std::string file = write("file.model", "other", "1");
  write("a.pt2", "ranker", "10");
  write("b.pt2", "ranker", "9");
  folder_.write("notes.txt", {});
  start({{file}, {path()}});
  EXPECT_EQ(models_.versions("ranker"), (std::vector<std::string>{"9", "10"}));
  EXPECT_EQ(models_.find("ranker", "")->manifest().model_version, "10");
  EXPECT_EQ(models_.find("ranker", "9")->manifest().model_version, "9");
  EXPECT_EQ(index(), "other 1 READY\nranker 10 READY\nranker 9 READY\n");
  EXPECT_TRUE(models_.are_ready());
}

TEST_F(ModelRepositoryTest, RefusesSourcesThatItCannotServe) {
  const std::string file = write("a.pt2", "ranker", "3");
  expect_contains(runtime::testing::error_of([&] { start({{file}, {path()}}); }),
                  "name and version must be unique; got model ranker version 3 in " + file);
  write("broken.pt2", "ranker", "4");
  folder_.write("broken.pt2", {});
  expect_contains(runtime::testing::error_of([&] { start({{}, {path()}}); }), "broken.pt2: cannot");
  std::filesystem::remove(path() + "/broken.pt2");
  std::filesystem::remove(file);
  expect_contains(runtime::testing::error_of([&] { start({{}, {path()}}, false); }),
                  "must name a package; there is none");
  start({{}, {path()}}, true);
  EXPECT_EQ(index(), "");
}

TEST_F(ModelRepositoryTest, ALoadServesWhatIsNewAndDropsWhatIsGone) {
  const std::string old = write("old.pt2", "ranker", "3");
  write("other.pt2", "other", "1");
  start({{}, {path()}});
  write("new.pt2", "ranker", "4");
  EXPECT_FALSE(load("ranker").has_value());
  EXPECT_EQ(num_loads_, 3) << "what has not changed is not loaded again";
  EXPECT_EQ(models_.find("ranker", "")->manifest().model_version, "4");
  EXPECT_EQ(models_.find("ranker", "3")->manifest().model_version, "3");
  std::filesystem::remove(old);
  EXPECT_FALSE(load("ranker").has_value());
  EXPECT_EQ(num_loads_, 3);
  EXPECT_EQ(index(), "other 1 READY\nranker 4 READY\n");
  const auto error = load("absent");
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind(), ErrorKind::kNotFound);
}

TEST_F(ModelRepositoryTest, AChangedFileIsLoadedAndItsCountsGoOn) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  const auto before = models_.find("ranker", "");
  before->metrics.requests.count(200);
  write("a.pt2", "ranker", "3");
  EXPECT_FALSE(load("ranker").has_value());
  const auto after = models_.find("ranker", "");
  EXPECT_NE(after, before);
  EXPECT_EQ(&after->metrics, &before->metrics);
  EXPECT_EQ(models_.metrics().size(), 1u);
}

TEST_F(ModelRepositoryTest, RequestsOfTheOldVersionFinishWhileTheNewOneServes) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  Gate gate;
  run_ = [&](const std::string& version) {
    if (version == "3") {
      gate.pass();
    }
  };
  gate.set_open(false);
  auto in_flight = submit(models_.find("ranker", ""));
  gate.wait_until_someone_waits();
  auto queued = submit(models_.find("ranker", "3"));
  const std::weak_ptr<ServedModel> old = models_.find("ranker", "3");
  write("a.pt2", "ranker", "4");
  EXPECT_FALSE(load("ranker").has_value());
  EXPECT_TRUE(is_answered(submit(models_.find("ranker", ""))));
  EXPECT_EQ(in_flight.wait_for(milliseconds(0)), std::future_status::timeout);
  EXPECT_FALSE(old.expired());
  gate.set_open(true);
  EXPECT_TRUE(is_answered(std::move(in_flight)));
  EXPECT_TRUE(is_answered(std::move(queued)));
  wait_until([&] { return old.expired(); });
}

TEST_F(ModelRepositoryTest, ServesWhileItLoads) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  Gate gate;
  load_ = [&](const std::string&) { gate.pass(); };
  gate.set_open(false);
  write("b.pt2", "ranker", "4");
  std::promise<void> is_loaded;
  repository_->load("ranker", [&](const auto&) { is_loaded.set_value(); });
  gate.wait_until_someone_waits();
  EXPECT_EQ(index(), "ranker 3 READY\nranker 4 LOADING\n");
  EXPECT_EQ(index(true), "ranker 3 READY\n");
  EXPECT_TRUE(models_.are_ready());
  EXPECT_TRUE(is_answered(submit(models_.find("ranker", ""))));
  gate.set_open(true);
  is_loaded.get_future().get();
  EXPECT_EQ(index(true), "ranker 3 READY\nranker 4 READY\n");
}

TEST_F(ModelRepositoryTest, AFailedLoadLeavesWhatIsServed) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  load_ = [](const std::string&) { IKBO_CHECK(false, "no such operator"); };
  write("b.pt2", "ranker", "4");
  auto error = load("ranker");
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind(), ErrorKind::kLoadFailed);
  EXPECT_STREQ(error->what(), "no such operator");
  EXPECT_EQ(index(), "ranker 3 READY\nranker 4 UNAVAILABLE (no such operator)\n");
  EXPECT_EQ(models_.versions("ranker"), std::vector<std::string>{"3"});
  // Its own file, too: the package that was loaded from it serves on.
  std::filesystem::remove(path() + "/b.pt2");
  write("a.pt2", "ranker", "3");
  EXPECT_TRUE(load("ranker").has_value());
  expect_contains(index(), "ranker 3 READY (the package before it serves on: no such operator)");
  EXPECT_TRUE(is_answered(submit(models_.find("ranker", ""))));
  // The first run fails.
  load_ = [](const std::string&) {};
  run_ = [](const std::string&) { IKBO_CHECK(false, "no such kernel"); };
  EXPECT_TRUE(load("ranker").has_value());
  run_ = [](const std::string&) {};
  EXPECT_FALSE(load("ranker").has_value());
  EXPECT_EQ(index(), "ranker 3 READY\n");
}

TEST_F(ModelRepositoryTest, AFileThatChangesWhileItIsLoadedIsRefused) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  load_ = [&](const std::string& version) {
    if (version == "4") {
      write("b.pt2", "ranker", "4");
    }
  };
  write("b.pt2", "ranker", "4");
  const auto error = load("ranker");
  ASSERT_TRUE(error.has_value());
  expect_contains(error->what(), "b.pt2: must not change while it is loaded");
}

TEST_F(ModelRepositoryTest, AnUnloadedModelIsNotServed) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  EXPECT_FALSE(unload("ranker").has_value());
  EXPECT_THROW(models_.find("ranker", ""), RequestError);
  EXPECT_EQ(index(), "ranker 3 UNAVAILABLE (unloaded)\n");
  EXPECT_EQ(index(true), "");
  const auto error = unload("ranker");
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind(), ErrorKind::kNotFound);
  EXPECT_FALSE(load("ranker").has_value());
  EXPECT_TRUE(is_answered(submit(models_.find("ranker", "3"))));
}

TEST_F(ModelRepositoryTest, RereadsItsSources) {
  const std::string ranker = write("a.pt2", "ranker", "3");
  const std::string other = write("b.pt2", "other", "1");
  start({{ranker}, {}});
  const auto reread = [&](std::function<PackageSources()> read) {
    std::promise<void> is_done;
    repository_->reread(std::move(read));
    background_.post([&] { is_done.set_value(); });
    is_done.get_future().get();
  };
  reread([&] { return PackageSources{{other}, {}}; });
  EXPECT_EQ(index(true), "other 1 READY\n");
  EXPECT_THROW(models_.find("ranker", ""), RequestError);
  reread([]() -> PackageSources { IKBO_CHECK(false, "no configuration"); });
  EXPECT_EQ(index(true), "other 1 READY\n");
  reread([&] { return PackageSources{{ranker, other}, {}}; });
  EXPECT_EQ(index(true), "other 1 READY\nranker 3 READY\n");
}

TEST_F(ModelRepositoryTest, AFailedDeviceMakesTheModelUnreadyUntilItIsLoadedAgain) {
  write("a.pt2", "ranker", "3");
  write("b.pt2", "other", "1");
  start({{}, {path()}});
  std::atomic<int> num_changes = 0;
  models_.watch([&] { ++num_changes; });
  std::atomic<bool> is_lost = true;
  run_ = [&](const std::string& version) {
    if (version == "3" && is_lost) {
      throw runtime::DeviceError("the device is lost");
    }
  };
  // The first runs after two loads fail on the device, too.
  load_ = [&](const std::string&) { is_lost = num_loads_ < 5; };
  const auto model = models_.find("ranker", "");
  auto future = submit(model);
  ASSERT_EQ(future.wait_for(kLong), std::future_status::ready);
  const Batcher::Outcome outcome = future.get();
  ASSERT_TRUE(std::holds_alternative<RequestError>(outcome));
  EXPECT_EQ(std::get<RequestError>(outcome).kind(), ErrorKind::kModelUnavailable);
  EXPECT_FALSE(model->is_ready());
  const auto refusal = [&] {
    try {
      submit(model);
    } catch (const RequestError& error) {
      return error.kind();
    }
    return ErrorKind::kBadRequest;
  };
  EXPECT_EQ(refusal(), ErrorKind::kModelUnavailable);
  EXPECT_TRUE(is_answered(submit(models_.find("other", "")))) << "the other model serves on";
  wait_until([&] { return models_.are_ready(); });
  EXPECT_EQ(num_loads_, 5);
  EXPECT_NE(models_.find("ranker", ""), model);
  EXPECT_TRUE(is_answered(submit(models_.find("ranker", ""))));
  EXPECT_EQ(index(), "other 1 READY\nranker 3 READY\n");
  EXPECT_GE(num_changes, 2);
  models_.watch({});
}

TEST_F(ModelRepositoryTest, WaitsLongerFromOneDeviceFailureToTheNext) {
  write("a.pt2", "ranker", "3");
  start({{}, {path()}});
  std::mutex mutex;
  std::vector<Background::Clock::time_point> loads;
  load_ = [&](const std::string&) {
    const std::lock_guard lock(mutex);
    loads.push_back(Background::Clock::now());
    IKBO_CHECK(loads.size() > 4, "still lost");
  };
  std::atomic<bool> is_lost = true;
  run_ = [&](const std::string&) {
    if (is_lost.exchange(false)) {
      throw runtime::DeviceError("the device is lost");
    }
  };
  const auto begin = Background::Clock::now();
  submit(models_.find("ranker", "")).wait();
  wait_until([&] { return models_.are_ready(); });
  // 20, 40, 80, 80 and 80 ms: the last ones are at the limit.
  const std::vector<int> least = {20, 60, 140, 220, 300};
  ASSERT_EQ(loads.size(), least.size());
  for (std::size_t i = 0; i < least.size(); ++i) {
    EXPECT_GE(loads[i] - begin, milliseconds(least[i])) << i;
  }
}

TEST(PackageFiles, OrdersVersionsByTheirNumbers) {
  for (const auto& [older, newer] : std::vector<std::pair<std::string, std::string>>{
           {"9", "10"}, {"1.9", "1.10"}, {"1", "1.1"}, {"", "1"}, {"a2", "a10"}, {"a", "b"}}) {
    EXPECT_TRUE(is_older_version(older, newer)) << older << " " << newer;
    EXPECT_FALSE(is_older_version(newer, older)) << older << " " << newer;
  }
  EXPECT_FALSE(is_older_version("7", "07"));
  EXPECT_FALSE(is_older_version("07", "7"));
}

TEST(Background, RunsWhatIsDueInOrderAndDropsTheRest) {
  std::string order;
  {
    Background background;
    const auto now = Background::Clock::now();
    background.post([&] { order += "c"; }, now + milliseconds(40));
    background.post([&] { order += "b"; }, now + milliseconds(20));
    background.post([&] { order += "a"; });
    background.post([&] { order += "z"; }, now + kLong);
    std::this_thread::sleep_until(now + milliseconds(60));
    background.stop();
    EXPECT_EQ(order, "abc");
    background.post([&] { order += "d"; });
    background.post([&] { order += "z"; }, Background::Clock::now() + kLong);
  }
  EXPECT_EQ(order, "abcd");
}

}  // namespace
}  // namespace ikbo::server
