// SPDX-License-Identifier: Apache-2.0
// The CUDA graphs of one session: which sizes get one, and which of them a run takes.
//
// A graph saves the launches of a run's kernels and costs the padding. It pays where kernels are
// short, so that is measured, never assumed: `choose_sizes` runs the model at each size of the grid
// and keeps those sizes whose graph is faster even for the emptiest run that it would be used for.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/cuda_graph.h"
#include "runtime/run_sizes.h"

namespace ikbo::runtime {

// Of a run without a graph, on made-up rows.
struct PlainRun {
  double launch_us = 0;   // until all is enqueued
  double run_us = 0;      // until the outputs are there
  std::size_t bytes = 0;  // of the GPU, that it needs at its peak
};

// What a session can do with a size.
class GraphMaker {
 public:
  virtual ~GraphMaker() = default;
  // Measures a run without a graph.
  virtual PlainRun run_plain(RunSize size) = 0;
  // Runs a size once without a graph: what libraries set up for a stream at its first run must
  // neither be recorded nor lie in the graphs' memory.
  virtual void warm_up(RunSize size) = 0;
  // Of every size to come before the first `capture`: all graphs use the same inputs and outputs.
  virtual void make_room(RunSize size) = 0;
  // Throws what CudaGraphStream::capture does.
  virtual std::unique_ptr<CudaGraph> capture(RunSize size) = 0;
  // Microseconds until the outputs of a replay are there, of a graph of `capture`.
  virtual double replay_us(CudaGraph& graph) = 0;
};

// Which sizes get a graph, in every session of a model.
struct GraphChoice {
  RunSizes sizes;
  std::vector<bool> has_graph;  // by RunSizes::index
  std::size_t bytes = 0;        // that the largest of the graphs' runs needs
};

class GraphSet {
 public:
  // Measures. A size whose runs need more than `max_bytes` gets no graph.
  static GraphSet choose(const RunSizes& sizes, std::size_t max_bytes, GraphMaker& maker);
  // The graphs that another session has.
  static GraphSet make(const GraphChoice& choice, GraphMaker& maker);

  struct Found {
    RunSize size;  // to which the run is padded
    CudaGraph* graph = nullptr;
  };
  // The graph of the least size that holds a run, where that size has one; else null.
  Found find(RunSize run) const;

  const GraphChoice& choice() const { return choice_; }
  int num_graphs() const;

 private:
  explicit GraphSet(GraphChoice choice);

  GraphChoice choice_;
  std::vector<std::unique_ptr<CudaGraph>> graphs_;  // by RunSizes::index
};

}  // namespace ikbo::runtime
