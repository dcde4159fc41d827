// SPDX-License-Identifier: Apache-2.0
// CUDA graphs by PyTorch's allocator. What needs CUDA's headers is in src/runtime/cuda, a library
// of its own (libikbo_cuda_graphs.so), which is loaded when graphs are asked for; it is built where
// the PyTorch that is compiled against has these headers beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace ikbo::runtime {

// A recorded run: the same kernels at the same addresses.
class CudaGraph {
 public:
  virtual ~CudaGraph() = default;
  // Enqueues it. Throws ikbo::Error.
  virtual void replay() = 0;
};

// A stream that nobody else has, and the memory of the graphs that are recorded from it: they share
// it, since they never run at once. Not thread-safe. It must outlive its graphs.
class CudaGraphStream {
 public:
  virtual ~CudaGraphStream() = default;
  // As PyTorch numbers streams; it must be the thread's current one in `capture`.
  virtual std::int64_t id() const = 0;
  // Records what `enqueue` does on the stream, without running it. What `enqueue` allocates stays
  // the graph's. Throws ikbo::Error when it does what cannot be recorded (waits for the GPU, say)
  // and whatever `enqueue` throws; the stream stays usable.
  virtual std::unique_ptr<CudaGraph> capture(const std::function<void()>& enqueue) = 0;
};

// PyTorch's CUDA library must be loaded. Throws ikbo::Error, which says why, where there can be no
// graphs.
std::unique_ptr<CudaGraphStream> make_cuda_graph_stream();

// What libikbo_cuda_graphs.so exports.
inline constexpr const char* kMakeCudaGraphStream = "ikbo_make_cuda_graph_stream";
using MakeCudaGraphStream = CudaGraphStream*();

}  // namespace ikbo::runtime
