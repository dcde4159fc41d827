// SPDX-License-Identifier: Apache-2.0
// libikbo_cuda_graphs.so: records CUDA graphs with memory of PyTorch's caching allocator.
//
// It links nothing of CUDA or PyTorch: the process has loaded libtorch_cuda.so, with all names
// public, before this library.
//
// Streams are kept for the next session instead of destroyed: PyTorch keeps memory for each stream
// that it has seen (blocks, cuBLAS's workspace), and would never use a destroyed one's again.
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "ikbo/error.h"
#include "runtime/cuda_graph.h"

namespace ikbo::runtime {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr c10::DeviceIndex kGpu = 0;  // the first that the process sees

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // of this call, not of the next
    IKBO_CHECK(false, "CUDA graphs: ", call, " failed: ", cudaGetErrorString(status));
  }
}

class FreeStreams {
 public:
  cudaStream_t take() {
    const std::lock_guard lock(mutex_);
    cudaStream_t stream = nullptr;
    if (streams_.empty()) {
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    } else {
      stream = streams_.back();
      streams_.pop_back();
    }
    return stream;
  }

  void give_back(cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

FreeStreams& free_streams() {
  static auto* streams = new FreeStreams;  // sessions may outlive static objects
  return *streams;
}

// A use of a memory pool of the caching allocator, which frees the pool after the last one.
class PoolUse {
 public:
  explicit PoolUse(c10::MempoolId_t pool) : pool_(pool) {}
  ~PoolUse() { allocator::releasePool(kGpu, pool_); }
  PoolUse(const PoolUse&) = delete;
  PoolUse& operator=(const PoolUse&) = delete;

 private:
  c10::MempoolId_t pool_;
};

class RecordedGraph final : public CudaGraph {
 public:
  RecordedGraph(cudaGraph_t graph, cudaStream_t stream, std::unique_ptr<PoolUse> memory)
      : stream_(stream), memory_(std::move(memory)) {
    check(cudaGraphInstantiateWithFlags(&executable_, graph, 0), "cudaGraphInstantiateWithFlags");
  }
  // A graph that still runs is destroyed once it has ended.
  ~RecordedGraph() override { cudaGraphExecDestroy(executable_); }
  RecordedGraph(const RecordedGraph&) = delete;
  RecordedGraph& operator=(const RecordedGraph&) = delete;

  void replay() override { check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  std::unique_ptr<PoolUse> memory_;
  cudaGraphExec_t executable_ = nullptr;
};

// Owns what a capture recorded until it is made executable.
struct GraphDeleter {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using OwnedGraph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, GraphDeleter>;

class PrivateStream final : public CudaGraphStream {
 public:
  PrivateStream() : stream_(free_streams().take()) {}
  ~PrivateStream() override {
    cudaStreamSynchronize(stream_);
    free_streams().give_back(stream_);
  }
  PrivateStream(const PrivateStream&) = delete;
  PrivateStream& operator=(const PrivateStream&) = delete;

  std::int64_t id() const override {
    return c10::cuda::getStreamFromExternal(stream_, kGpu).unwrap().id();
  }

  std::unique_ptr<CudaGraph> capture(const std::function<void()>& enqueue) override {
    // Before the capture begins, so that no allocation of another thread's is in doubt.
    allocator::beginAllocateToPool(kGpu, pool_,
                                   [this](cudaStream_t stream) { return stream == stream_; });
    auto memory = std::make_unique<PoolUse>(pool_);
    std::exception_ptr failure;
    OwnedGraph graph;
    try {
      graph = record(enqueue);
    } catch (...) {
      failure = std::current_exception();
    }
    allocator::endAllocateToPool(kGpu, pool_);
    if (failure != nullptr) {
      std::rethrow_exception(failure);
    }
    return std::make_unique<RecordedGraph>(graph.get(), stream_, std::move(memory));
  }

 private:
  // NOTE: thread-local, since other threads load and run models meanwhile; this one must not call
  // what cannot be recorded.
  OwnedGraph record(const std::function<void()>& enqueue) {
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    std::exception_ptr failure;
    try {
      enqueue();
    } catch (...) {
      failure = std::current_exception();
    }
    cudaGraph_t recorded = nullptr;
    const cudaError_t status = cudaStreamEndCapture(stream_, &recorded);
    OwnedGraph graph(recorded);
    if (failure != nullptr) {
      cudaGetLastError();  // what the failure left
      std::rethrow_exception(failure);
    }
    check(status, "cudaStreamEndCapture");
    return graph;
  }

  cudaStream_t stream_;
  c10::MempoolId_t pool_ = at::cuda::MemPool::graph_pool_handle(/*is_user_created=*/false);
};

}  // namespace
}  // namespace ikbo::runtime

extern "C" __attribute__((visibility("default"))) ikbo::runtime::CudaGraphStream*
ikbo_make_cuda_graph_stream() {
  return new ikbo::runtime::PrivateStream;
}
