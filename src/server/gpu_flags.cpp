// SPDX-License-Identifier: Apache-2.0
#include "server/gpu_flags.h"

#include <cstddef>

namespace ikbo::server {

void add_gpu_flags(CLI::App& app, runtime::GraphOptions& graphs) {
  constexpr int kMostGraphs = 4096;
  graphs.max_graphs = 128;
  app.add_option("--cuda-graphs", graphs.max_graphs,
                 "Of a package for CUDA, record the runs of at most this many sizes as CUDA graphs "
                 "for each worker, where that makes them faster; 0: none")
      ->check(CLI::Range(0, kMostGraphs))
      ->capture_default_str();
  app.add_option("--cuda-graph-memory", graphs.max_bytes,
                 "Bytes of the GPU's memory that the runs of one model's graphs may need; 0: an "
                 "eighth of it")
      ->check(CLI::Range(std::size_t{0}, std::size_t{1} << 50))
      ->capture_default_str();
}

}  // namespace ikbo::server
