// SPDX-License-Identifier: Apache-2.0
// Runs an AOTInductor package on a GPU. A run, all of it on the session's stream, which the host
// waits for once, at the end:
//
//   inputs -> one pinned block -> one block of the GPU -> compiled code -> one pinned block
//
// The blocks are the session's and stay; what is between them is launched kernel by kernel, or is
// one CUDA graph, which the run is padded to fit. Copies of one session overlap the kernels of
// another.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "runtime/aoti_model.h"
#include "runtime/gpu_staging.h"
#include "runtime/graph_set.h"
#include "runtime/run_blocks.h"

namespace ikbo::runtime {
namespace {

using Clock = std::chrono::steady_clock;

struct RunCounts {
  std::atomic<bool> is_gpu_used = false;
  std::atomic<std::int64_t> graph_runs = 0;
  std::atomic<std::int64_t> plain_runs = 0;
};

RunCounts& run_counts() {
  static RunCounts counts;
  return counts;
}

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// What the sessions of a model share.
struct GpuModel {
  GpuModel(const Package& package, const ModelOptions& options, const Program& program)
      : compiled(package, program, options.num_sessions,
                 options.graphs.max_graphs > 0 ? Entry::kSingle : Entry::kPooled),
        graphs(options.graphs),
        num_sessions(static_cast<std::size_t>(options.num_sessions)) {}

  CompiledModel compiled;
  GraphOptions graphs;
  std::size_t num_sessions;
  // Sessions make their graphs one after the other: the first one measures.
  std::mutex making;
  std::optional<GraphChoice> choice;
  bool has_failed = false;  // to make graphs
};

std::int64_t largest(std::int64_t wanted, std::int64_t range) {
  return wanted == 0 ? range : std::min(wanted, range);
}

class GpuExecutor final : public Executor, private GraphMaker {
 public:
  explicit GpuExecutor(std::shared_ptr<GpuModel> model)
      : model_(std::move(model)),
        stream_(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(gpu())) {
  }

  std::shared_ptr<Executor> for_session() override {
    auto session = std::make_shared<GpuExecutor>(model_);
    if (model_->graphs.max_graphs > 0) {
      session->make_graphs();
    }
    return session;
  }

  std::vector<Tensor> run(const RunInputs& inputs) override {
    const c10::InferenceMode inference_mode;
    const c10::StreamGuard on_stream(stream_);
    try {
      return guarded("model " + manifest().model_name + ": its run on the GPU failed",
                     [&] { return run_on_stream(inputs); });
    } catch (const Error& error) {
      try {
        stream_.synchronize();  // a device that works can
      } catch (const std::exception&) {
        throw DeviceError(error.what());
      }
      throw;
    }
  }

 private:
  const Manifest& manifest() const { return model_->compiled.manifest(); }

  std::vector<Tensor> run_on_stream(const RunInputs& inputs) {
    const RunSize size{inputs.num_users, inputs.num_candidates};
    const GraphSet::Found found = graphs_.has_value() ? graphs_->find(size) : GraphSet::Found{};
    const RunSize padded = found.graph != nullptr ? found.size : size;
    Staging& staging = found.graph != nullptr ? graph_staging_ : staging_;
    staging.reserve(manifest(), padded);
    write_padded(manifest().inputs, inputs, padded, staging.inputs(), staging.input_bytes());
    if (found.graph != nullptr) {
      found.graph->replay();
    } else {
      staging.enqueue(model_->compiled, padded);
    }
    stream_.synchronize();
    ++(found.graph != nullptr ? run_counts().graph_runs : run_counts().plain_runs);
    return copy_rows(manifest().outputs, size, staging.outputs(), staging.output_bytes());
  }

  // Makes them, or says why there are none; a model that cannot be recorded runs without.
  void make_graphs() {
    const std::lock_guard lock(model_->making);
    if (model_->has_failed) {
      return;
    }
    const GraphOptions& options = model_->graphs;
    const Clock::time_point begin = Clock::now();
    const RunSizes sizes({largest(options.max_users, manifest().max_users),
                          largest(options.max_candidates, manifest().max_candidates)},
                         options.max_graphs);
    GraphReport report;
    report.model_name = manifest().model_name;
    report.model_version = manifest().model_version;
    report.num_sizes = static_cast<int>(sizes.size());
    try {
      guarded("no CUDA graphs", [&] { make_graphs_of(sizes); });
      report.num_graphs = graphs_->num_graphs();
      report.bytes = graphs_->choice().bytes;
    } catch (const Error& error) {
      model_->has_failed = true;
      report.error = error.what();
    }
    report.time = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin);
    if (options.on_made) {
      options.on_made(report);
    }
  }

  void make_graphs_of(const RunSizes& sizes) {
    graph_stream_ = make_cuda_graph_stream();
    stream_ = c10::Stream(c10::Stream::UNSAFE, gpu(), graph_stream_->id());
    const c10::InferenceMode inference_mode;
    const c10::StreamGuard on_stream(stream_);
    if (!model_->choice.has_value()) {
      graphs_.emplace(GraphSet::choose(sizes, max_graph_bytes(), *this));
      model_->choice = graphs_->choice();
    } else {
      graphs_.emplace(GraphSet::make(*model_->choice, *this));
    }
  }

  // Of one session.
  std::size_t max_graph_bytes() const {
    std::size_t bytes = model_->graphs.max_bytes;
    if (bytes == 0) {
      constexpr std::size_t kShare = 8;
      bytes = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getMemoryInfo(gpu().index()).second /
              kShare;
    }
    return bytes / model_->num_sessions;
  }

  // GraphMaker, on the session's stream:

  PlainRun run_plain(RunSize size) override {
    c10::DeviceAllocator* memory = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    staging_.reserve(manifest(), size);
    write_made_up(manifest().inputs, size, staging_.inputs(), staging_.input_bytes());
    PlainRun best;
    for (int i = 0; i < kMeasuredRuns; ++i) {
      memory->resetPeakStats(gpu().index());
      const Clock::time_point begin = Clock::now();
      staging_.enqueue(model_->compiled, size);
      const double launch_us = us_since(begin);
      stream_.synchronize();
      const double run_us = us_since(begin);
      // The first run of a size loads kernels.
      if (i == 1 || (i > 1 && run_us < best.run_us)) {
        best = {launch_us, run_us, 0};
      }
    }
    const auto held = memory->getDeviceStats(gpu().index()).allocated_bytes[kAllSizes];
    best.bytes = static_cast<std::size_t>(held.peak - held.current);
    return best;
  }

  // NOTE: PyTorch makes cuBLAS's workspace for a thread and a stream at the first product there and
  // keeps it for good. Made while a graph is recorded, it would lie in the graph's memory, which
  // goes with the session, and the stream's next session would compute in it.
  void warm_up(RunSize size) override {
    staging_.reserve(manifest(), size);
    write_made_up(manifest().inputs, size, staging_.inputs(), staging_.input_bytes());
    staging_.enqueue(model_->compiled, size);
    stream_.synchronize();
  }

  void make_room(RunSize size) override { graph_staging_.reserve(manifest(), size); }

  std::unique_ptr<CudaGraph> capture(RunSize size) override {
    graph_staging_.reserve(manifest(), size);
    return graph_stream_->capture([&] { graph_staging_.enqueue(model_->compiled, size); });
  }

  double replay_us(CudaGraph& graph) override {
    double best = 0;
    for (int i = 0; i < kMeasuredRuns; ++i) {
      const Clock::time_point begin = Clock::now();
      graph.replay();
      stream_.synchronize();
      const double run_us = us_since(begin);
      best = i == 0 ? run_us : std::min(best, run_us);
    }
    return best;
  }

  static constexpr int kMeasuredRuns = 4;
  static constexpr std::size_t kAllSizes = 0;  // of the allocator's statistics, blocks of any size

  std::shared_ptr<GpuModel> model_;
  std::unique_ptr<CudaGraphStream> graph_stream_;  // null: the stream is one of PyTorch's
  c10::Stream stream_;
  Staging staging_;        // of runs without a graph
  Staging graph_staging_;  // its addresses are in the graphs
  std::optional<GraphSet> graphs_;
};

}  // namespace

std::shared_ptr<Executor> make_gpu_executor(const Package& package, const ModelOptions& options,
                                            const Program& program) {
  run_counts().is_gpu_used = true;
  return std::make_shared<GpuExecutor>(std::make_shared<GpuModel>(package, options, program));
}

std::optional<GpuCounts> gpu_counts() {
  const RunCounts& runs = run_counts();
  if (!runs.is_gpu_used) {
    return std::nullopt;
  }
  const auto device = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(gpu().index());
  const auto host = at::getHostAllocator(at::kCUDA)->get_stats();
  return GpuCounts{runs.graph_runs, runs.plain_runs, device.num_device_alloc, host.num_host_alloc,
                   device.reserved_bytes[0].current};
}

}  // namespace ikbo::runtime
