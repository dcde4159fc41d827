// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include "fixtures.h"
#include "runtime/graph_set.h"

namespace ikbo::runtime::testing {
namespace {

// Times by formula; what it was asked for.
class FakeGpu final : public GraphMaker {
 public:
  class Graph final : public CudaGraph {
   public:
    explicit Graph(RunSize size) : size(size) {}
    void replay() override {}
    RunSize size;
  };

  PlainRun run_plain(RunSize size) override {
    plain.push_back(size);
    // Kernels run beside the launches of those that follow.
    const double kernels_us = kernels(size);
    return {launch_us, std::max(launch_us, kernels_us) + 10, bytes(size)};
  }
  void warm_up(RunSize size) override { warm.push_back(size); }
  void make_room(RunSize size) override {
    EXPECT_TRUE(captured.empty()) << "graphs that are there must not lose their room";
    room.push_back(size);
  }
  std::unique_ptr<CudaGraph> capture(RunSize size) override {
    if (fails) {
      IKBO_CHECK(false, "capture of ", size.num_users, " users");
    }
    EXPECT_NE(std::ranges::find(room, size), room.end());
    EXPECT_NE(std::ranges::find(warm, size), warm.end());
    captured.push_back(size);
    return std::make_unique<Graph>(size);
  }
  double replay_us(CudaGraph& graph) override {
    return kernels(dynamic_cast<Graph&>(graph).size) + 10;
  }

  double launch_us = 500;
  std::function<double(RunSize)> kernels = [](RunSize size) {
    return 50.0 + static_cast<double>(size.num_candidates + 10 * size.num_users);
  };
  std::function<std::size_t(RunSize)> bytes = [](RunSize size) {
    return static_cast<std::size_t>(1000 * size.num_candidates);
  };
  bool fails = false;
  std::vector<RunSize> plain;
  std::vector<RunSize> warm;
  std::vector<RunSize> room;
  std::vector<RunSize> captured;
};

constexpr std::size_t kNoBound = std::size_t{1} << 40;

RunSize size_of_graph(const GraphSet::Found& found) {
  EXPECT_EQ(dynamic_cast<FakeGpu::Graph&>(*found.graph).size, found.size);
  return found.size;
}

TEST(GraphSet, HasGraphsWhereLaunchesAreWhatARunWaitsFor) {
  FakeGpu gpu;
  const RunSizes sizes({4, 4096}, 1000);
  const GraphSet set = GraphSet::choose(sizes, kNoBound, gpu);
  EXPECT_EQ(size_of_graph(set.find({1, 1})), (RunSize{1, 16}));
  EXPECT_EQ(size_of_graph(set.find({3, 100})), (RunSize{4, 112}));
  // A replay of 384 candidates takes 454 us and of 448 518 us; 500 us of launches, and 10, are
  // what it competes with.
  EXPECT_EQ(size_of_graph(set.find({1, 380})), (RunSize{1, 384}));
  EXPECT_EQ(set.find({1, 400}).graph, nullptr);
  EXPECT_EQ(set.find({5, 16}).graph, nullptr) << "beyond the limits";
  EXPECT_GT(set.num_graphs(), 0);
  EXPECT_EQ(set.choice().bytes, 384'000U);
}

TEST(GraphSet, NeverRunsWhatIsFarTooLargeForOne) {
  FakeGpu gpu;
  GraphSet::choose(RunSizes({4, 4096}, 1000), kNoBound, gpu);
  // One size for each number of users shows that launches are hidden; none beyond it is run.
  const auto is_hidden = [&](RunSize size) { return gpu.kernels(size) + 10 > 2 * 500 + 100; };
  EXPECT_EQ(std::ranges::count_if(gpu.plain, is_hidden), 3);
  EXPECT_EQ(std::ranges::find(gpu.plain, (RunSize{1, 4096})), gpu.plain.end());
}

TEST(GraphSet, LooksOnceAtAModelWhoseLeastRunIsTooLarge) {
  FakeGpu gpu;
  gpu.kernels = [](RunSize) { return 5000.0; };
  const GraphSet set = GraphSet::choose(RunSizes({4, 4096}, 1000), kNoBound, gpu);
  EXPECT_EQ(gpu.plain.size(), 1U);
  EXPECT_EQ(set.num_graphs(), 0);
}

TEST(GraphSet, ComparesWithTheEmptiestRunOfASize) {
  FakeGpu gpu;
  gpu.launch_us = 100;
  // The second step of users, alone, is as slow as a run that is launched kernel by kernel.
  gpu.kernels = [](RunSize size) { return size.num_users > 1 ? 101.0 : 20.0; };
  const GraphSet set = GraphSet::choose(RunSizes({2, 16}, 9), kNoBound, gpu);
  EXPECT_NE(set.find({1, 16}).graph, nullptr);
  EXPECT_EQ(set.find({2, 16}).graph, nullptr)
      << "two users take 111 us by a graph, 111 us without, but one user would only take 110";
}

TEST(GraphSet, LeavesOutWhatNeedsTooMuchMemory) {
  FakeGpu gpu;
  const GraphSet set = GraphSet::choose(RunSizes({1, 256}, 1000), 100'000, gpu);
  EXPECT_NE(set.find({1, 96}).graph, nullptr);
  EXPECT_EQ(set.find({1, 112}).graph, nullptr);
  EXPECT_EQ(set.choice().bytes, 96'000U);
}

TEST(GraphSet, CapturesTheLargestFirst) {
  FakeGpu gpu;
  GraphSet::choose(RunSizes({4, 64}, 1000), kNoBound, gpu);
  ASSERT_GT(gpu.captured.size(), 1U);
  EXPECT_EQ(gpu.captured.front(), (RunSize{4, 64}));
  EXPECT_EQ(gpu.captured.back(), (RunSize{1, 16}));
}

TEST(GraphSet, IsTheSameInEverySession) {
  FakeGpu first;
  FakeGpu second;
  const GraphSet set = GraphSet::choose(RunSizes({4, 4096}, 100), kNoBound, first);
  const GraphSet other = GraphSet::make(set.choice(), second);
  EXPECT_TRUE(second.plain.empty()) << "only the first session measures";
  EXPECT_EQ(other.num_graphs(), set.num_graphs());
  EXPECT_EQ(static_cast<int>(second.captured.size()), set.num_graphs());
  for (std::int64_t candidates = 1; candidates <= 4096; candidates += 5) {
    const RunSize run{3, candidates};
    ASSERT_EQ(set.find(run).graph == nullptr, other.find(run).graph == nullptr);
    ASSERT_EQ(set.find(run).size, other.find(run).size);
  }
}

TEST(GraphSet, PassesOnWhyNothingCanBeCaptured) {
  FakeGpu gpu;
  gpu.fails = true;
  expect_contains(error_of([&] { GraphSet::choose(RunSizes({4, 64}, 1000), kNoBound, gpu); }),
                  "capture of 4 users");
}

}  // namespace
}  // namespace ikbo::runtime::testing
