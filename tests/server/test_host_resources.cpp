// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fixtures.h"
#include "ikbo/error.h"
#include "server/host_resources.h"
#include "server/memory_budget.h"

namespace ikbo::server {
namespace {

constexpr std::size_t kGibibyte = std::size_t{1} << 30;
constexpr HostResources kMachine{16, 64 * kGibibyte};

class HostResourcesTest : public ::testing::Test {
 protected:
  ~HostResourcesTest() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
  }
  // What is left of the machine for a process whose /proc/self/cgroup holds `own`.
  HostResources found(const std::string& own) const {
    write("own", own);
    return limit_by_cgroup(kMachine, (folder_ / "own").string(), (folder_ / "fs").string());
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("ikbo_host_" + std::to_string(getpid()));
};

TEST_F(HostResourcesTest, WithoutLimitsTheMachineStays) {
  EXPECT_EQ(limit_by_cgroup(kMachine, "/none", "/none").cores, 16);
  write("fs/a/cpu.max", "max 100000\n");
  write("fs/a/memory.max", "max\n");
  EXPECT_EQ(found("0::/a\n").cores, 16);
  EXPECT_EQ(found("0::/a\n").memory_bytes, kMachine.memory_bytes);
  EXPECT_EQ(found("no line of this form\n").cores, 16);
  // Version 1 says -1, and a number near 2^63.
  write("fs/cpu/a/cpu.cfs_quota_us", "-1\n");
  write("fs/cpu/a/cpu.cfs_period_us", "100000\n");
  write("fs/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(found("4:cpu,cpuacct:/a\n3:memory:/a\n").cores, 16);
  EXPECT_EQ(found("4:cpu,cpuacct:/a\n3:memory:/a\n").memory_bytes, kMachine.memory_bytes);
}

TEST_F(HostResourcesTest, VersionTwo) {
  write("fs/pod/app/cpu.max", "350000 100000\n");
  write("fs/pod/app/memory.max", "8589934592\n");
  EXPECT_EQ(found("0::/pod/app\n").cores, 3);
  EXPECT_EQ(found("0::/pod/app\n").memory_bytes, 8 * kGibibyte);
  // What holds the group limits it too.
  write("fs/pod/cpu.max", "200000 100000\n");
  write("fs/memory.max", "4294967296\n");
  EXPECT_EQ(found("0::/pod/app\n").cores, 2);
  EXPECT_EQ(found("0::/pod/app\n").memory_bytes, 4 * kGibibyte);
  // A path from outside of a container: its root still counts.
  EXPECT_EQ(found("0::/elsewhere/x\n").memory_bytes, 4 * kGibibyte);
  write("fs/cpu.max", "50000 100000\n");
  EXPECT_EQ(found("0::/\n").cores, 1);
}

TEST_F(HostResourcesTest, VersionOne) {
  write("fs/cpu/app/cpu.cfs_quota_us", "400000\n");
  write("fs/cpu/app/cpu.cfs_period_us", "100000\n");
  write("fs/memory/app/memory.limit_in_bytes", "1073741824\n");
  const HostResources resources = found("5:cpu,cpuacct:/app\n4:memory:/app\n1:name=systemd:/app\n");
  EXPECT_EQ(resources.cores, 4);
  EXPECT_EQ(resources.memory_bytes, kGibibyte);
}

TEST_F(HostResourcesTest, ThisProcess) {
  const HostResources resources = find_host_resources();
  EXPECT_GE(resources.cores, 1);
  EXPECT_LE(resources.cores, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_GE(resources.memory_bytes, std::size_t{16} << 20);
}

TEST(MemoryBudget, GivesBackWhatWasTaken) {
  MemoryBudget budget(100);
  {
    MemoryBudget::Lease first = budget.take(60);
    const RequestError error = testing::error_of([&] { budget.take(41); });
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    testing::expect_contains(error.what(), "(--max-request-memory 100) 40 bytes are left now");
    MemoryBudget::Lease second = budget.take(40);
    EXPECT_EQ(budget.used(), 100u);
    first = std::move(second);
    const MemoryBudget::Lease third = std::move(first);
    EXPECT_EQ(budget.used(), 100u);  // the swapped lease ends with `second`
  }
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(testing::error_of([&] { budget.take(101); }).kind(), ErrorKind::kOutOfMemory);
}

TEST(Cores, AreSharedByTheWorkersWithoutOverlap) {
  const std::vector<CpuSet> cores = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  EXPECT_EQ(share_of_worker(cores, 0, 1), (CpuSet{0, 4, 1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(share_of_worker(cores, 0, 2), (CpuSet{0, 4, 1, 5}));
  EXPECT_EQ(share_of_worker(cores, 1, 2), (CpuSet{2, 6, 3, 7}));
  EXPECT_EQ(share_of_worker(cores, 0, 3), (CpuSet{0, 4}));
  EXPECT_EQ(share_of_worker(cores, 2, 3), (CpuSet{2, 6, 3, 7}));
  EXPECT_EQ(share_of_worker(cores, 5, 6), (CpuSet{1, 5})) << "more workers than cores";
  EXPECT_EQ(share_of_worker({}, 0, 1), CpuSet{});
}

TEST(Cores, ThatRunsLeaveOverAreForAllElse) {
  const std::vector<CpuSet> cores = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  const CoreSplit split = split_cores(cores, 3);
  EXPECT_EQ(split.workers, (std::vector<CpuSet>{{1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(split.others, (CpuSet{0, 4}));
  EXPECT_EQ(split_cores(cores, 1).others, (CpuSet{0, 4, 1, 5, 2, 6}));
  for (const int count : {4, 5}) {
    EXPECT_EQ(split_cores(cores, count).workers, cores);
    EXPECT_EQ(split_cores(cores, count).others, CpuSet{});
  }
  EXPECT_EQ(split_cores({}, 1).workers, std::vector<CpuSet>{});
}

TEST(Cores, APinnedThreadAndItsOwnRunThere) {
  const std::vector<CpuSet> cores = find_cores();
  ASSERT_FALSE(cores.empty());
  std::thread([&] {
    pin_thread(cores.back());
    EXPECT_EQ(find_cores(), std::vector<CpuSet>{cores.back()});
    std::thread([&] { EXPECT_EQ(find_cores(), std::vector<CpuSet>{cores.back()}); }).join();
  }).join();
  EXPECT_EQ(find_cores(), cores);
  EXPECT_THROW(pin_thread({}), Error);
}

TEST(MemoryBudget, IsExactOverThreads) {
  MemoryBudget budget(1000);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&budget] {
      for (int k = 0; k < 10'000; ++k) {
        try {
          const MemoryBudget::Lease lease = budget.take(300);
          EXPECT_LE(budget.used(), budget.limit());
        } catch (const RequestError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(budget.used(), 0u);
}

}  // namespace
}  // namespace ikbo::server
