// SPDX-License-Identifier: Apache-2.0
// Cores and memory that this process may use: those of the machine, or fewer where a cgroup (a
// container) or the affinity mask says so.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ikbo::server {

struct HostResources {
  int cores = 1;  // not the threads that a core runs at once
  std::size_t memory_bytes = 0;
};

// The limits of the cgroup that `own_cgroups` (a copy of /proc/self/cgroup) names below `root`
// (/sys/fs/cgroup), version 1 or 2, and of all that hold it. What is unlimited, missing or
// unreadable leaves `machine` as it is.
HostResources limit_by_cgroup(const HostResources& machine, const std::string& own_cgroups,
                              const std::string& root);

HostResources find_host_resources();

// A core by the processors (the threads that it runs at once) of it that this process may use.
using CpuSet = std::vector<int>;

// Those that the affinity mask allows, in the order of their first processors.
std::vector<CpuSet> find_cores();

struct CoreSplit {
  std::vector<CpuSet> workers;
  CpuSet others;  // the processors of all other threads; empty: any
};
// The last `count` cores for workers, those before them for all else (interrupts come to the first,
// as a rule). Without any to leave, workers have all and the others are anywhere.
CoreSplit split_cores(const std::vector<CpuSet>& cores, int count);

// The processors of the share that one of `num_workers` has in `cores`: neighbours, no core in two
// shares, unless there are fewer cores than workers.
CpuSet share_of_worker(const std::vector<CpuSet>& cores, int worker, int num_workers);

// The calling thread, and those that it starts from then on. Throws ikbo::Error.
// The calling thread, and those that it starts from here on, run there alone. Throws ikbo::Error.
void pin_thread(const CpuSet& cpus);

}  // namespace ikbo::server
