// SPDX-License-Identifier: Apache-2.0
#include "server/host_resources.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "ikbo/error.h"

namespace ikbo::server {
namespace {

// The first `count` words of a file as numbers; false when one is none ("max": no limit).
bool read_numbers(const std::string& path, int count, std::int64_t* numbers) {
  std::ifstream file(path);
  for (int i = 0; i < count; ++i) {
    if (!(file >> numbers[i])) {
      return false;
    }
  }
  return true;
}

void limit_cores(std::int64_t quota, std::int64_t period, HostResources& resources) {
  if (quota > 0 && period > 0) {
    const std::int64_t cores = std::max<std::int64_t>(1, quota / period);
    resources.cores = static_cast<int>(std::min<std::int64_t>(resources.cores, cores));
  }
}

void limit_memory(std::int64_t bytes, HostResources& resources) {
  if (bytes > 0) {
    resources.memory_bytes = std::min(resources.memory_bytes, static_cast<std::size_t>(bytes));
  }
}

// The limits that one folder of the hierarchy holds; files that are not there hold none.
void limit_by_folder(const std::string& folder, HostResources& resources) {
  std::int64_t numbers[2] = {};
  if (read_numbers(folder + "/cpu.max", 2, numbers)) {
    limit_cores(numbers[0], numbers[1], resources);
  }
  if (read_numbers(folder + "/cpu.cfs_quota_us", 1, numbers) &&
      read_numbers(folder + "/cpu.cfs_period_us", 1, numbers + 1)) {
    limit_cores(numbers[0], numbers[1], resources);
  }
  for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
    if (read_numbers(folder + name, 1, numbers)) {
      limit_memory(numbers[0], resources);
    }
  }
}

// From `path` ("/a/b") below `root` up to `root` itself.
void limit_by_path(const std::string& root, std::string path, HostResources& resources) {
  for (;;) {
    limit_by_folder(root + path, resources);
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) {
      return;
    }
    path.resize(slash);
  }
}

}  // namespace

HostResources limit_by_cgroup(const HostResources& machine, const std::string& own_cgroups,
                              const std::string& root) {
  HostResources resources = machine;
  std::ifstream lines(own_cgroups);
  // "0::/path" for version 2, "4:cpu,cpuacct:/path" for version 1.
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      limit_by_path(root, path, resources);
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "cpu" || name == "memory") {
        limit_by_path((std::filesystem::path(root) / name).string(), path, resources);
      }
    }
  }
  return resources;
}

HostResources find_host_resources() {
  HostResources machine;
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  const std::size_t cores = find_cores().size();
  machine.cores = std::max(1, cores > 0 ? static_cast<int>(cores) : static_cast<int>(online));
  machine.memory_bytes = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                         static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return limit_by_cgroup(machine, "/proc/self/cgroup", "/sys/fs/cgroup");
}

std::vector<CpuSet> find_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (pthread_getaffinity_np(pthread_self(), sizeof(mask), &mask) != 0) {
    return {};
  }
  std::vector<CpuSet> cores;
  std::map<std::string, std::size_t> places;  // two processors of one core name the same siblings
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) {
      const std::string name = "cpu" + std::to_string(cpu);
      std::string path = "/sys/devices/system/cpu/";
      path.append(name).append("/topology/thread_siblings_list");
      std::ifstream file(path);
      std::string list;
      const auto [place, is_new] =
          places.emplace(std::getline(file, list) ? list : name, cores.size());
      if (is_new) {
        cores.emplace_back();
      }
      cores[place->second].push_back(cpu);
    }
  }
  return cores;
}

CoreSplit split_cores(const std::vector<CpuSet>& cores, int count) {
  const auto wanted = static_cast<std::size_t>(count);
  if (wanted >= cores.size()) {
    return {cores, {}};
  }
  const auto first = cores.end() - count;
  CoreSplit split{{first, cores.end()}, {}};
  for (auto core = cores.begin(); core != first; ++core) {
    split.others.insert(split.others.end(), core->begin(), core->end());
  }
  return split;
}

CpuSet share_of_worker(const std::vector<CpuSet>& cores, int worker, int num_workers) {
  if (cores.empty()) {
    return {};
  }
  const auto index = static_cast<std::size_t>(worker);
  const auto count = static_cast<std::size_t>(num_workers);
  std::size_t first = index * cores.size() / count;
  std::size_t last = (index + 1) * cores.size() / count;
  if (cores.size() < count) {
    first = index % cores.size();
    last = first + 1;
  }
  CpuSet share;
  for (std::size_t core = first; core < last; ++core) {
    share.insert(share.end(), cores[core].begin(), cores[core].end());
  }
  return share;
}

void pin_thread(const CpuSet& cpus) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : cpus) {
    CPU_SET(cpu, &mask);
  }
  const int error = pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask);
  IKBO_CHECK(error == 0, "--pin-workers: the processors must be this process's to use; got ",
             std::strerror(error));
}

}  // namespace ikbo::server
