// SPDX-License-Identifier: Apache-2.0
// CUDA graphs of a model's runs: what a caller asks for, and is told.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace ikbo::runtime {

// What became of the graphs of one session.
struct GraphReport {
  std::string model_name;
  std::string model_version;
  int num_graphs = 0;
  int num_sizes = 0;      // for which one was thought of
  std::size_t bytes = 0;  // of the GPU, that the graphs' runs need
  std::chrono::microseconds time{};
  std::string error;  // why there can be none; empty: those that are missing would not gain
};

// For packages for CUDA; others ignore it.
struct GraphOptions {
  int max_graphs = 0;          // of one session; 0: runs launch their kernels one by one
  std::size_t max_bytes = 0;   // of the GPU, for all sessions; 0: an eighth of its memory
  std::int64_t max_users = 0;  // of the largest run to come; 0, and at most: the package's range
  std::int64_t max_candidates = 0;  // likewise
  // Called by the thread that makes a session, once the graphs are made; of a failure, which all
  // sessions share, once for the model.
  std::function<void(const GraphReport&)> on_made;
};

// Of this process, since it began.
struct GpuCounts {
  std::int64_t graph_runs = 0;          // runs that were one launch
  std::int64_t plain_runs = 0;          // runs that launched their kernels one by one
  std::int64_t device_allocations = 0;  // times that CUDA was asked for memory of the GPU
  std::int64_t pinned_allocations = 0;  // times that CUDA was asked for pinned memory of the host
  std::int64_t device_bytes = 0;        // that are held of the GPU now
};

// Nothing in a process that has loaded no package for CUDA. May be called by any thread.
std::optional<GpuCounts> gpu_counts();

}  // namespace ikbo::runtime
