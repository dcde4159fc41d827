// SPDX-License-Identifier: Apache-2.0
// The same launch a thousand times, or a hundred replays of it, every result compared on the
// device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device_memory.h"

namespace ikbo::test {

// Adds to *g_count how many 16-bit words of two results differ.
__global__ void count_differences_kernel(const std::uint16_t* g_result,
                                         const std::uint16_t* g_expected, std::int64_t words,
                                         unsigned* g_count) {
  unsigned count = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < words;
       i += gridDim.x * std::int64_t{256}) {
    count += g_result[i] != g_expected[i];
  }
  if (count > 0) atomicAdd(g_count, count);
}

// Keeps the memory busy from a stream of its own, so that loads take turns at being late.
class MemoryHog {
 public:
  MemoryHog() : from_(kBytes), to_(kBytes) {
    IKBO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "memory hog");
  }
  ~MemoryHog() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  MemoryHog(const MemoryHog&) = delete;
  MemoryHog& operator=(const MemoryHog&) = delete;

  void copy_once() const {
    IKBO_CUDA_CHECK(
        cudaMemcpyAsync(to_.data(), from_.data(), kBytes, cudaMemcpyDeviceToDevice, stream_),
        "memory hog");
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{64} << 20;
  GuardedBuffer from_, to_;
  cudaStream_t stream_ = nullptr;
};

// How much each of a number of results differs from what was expected.
class DifferenceCounts {
 public:
  explicit DifferenceCounts(int num_results) : counts_(num_results * sizeof(unsigned)) {
    IKBO_CUDA_CHECK(cudaMemset(counts_.data(), 0, counts_.bytes()), "counts");
  }
  void add(int number, const GuardedBuffer& result, const GuardedBuffer& expected) {
    words_ = static_cast<std::int64_t>(result.bytes() / 2);
    count_differences_kernel<<<1024, 256>>>(result.data<std::uint16_t>(),
                                            expected.data<std::uint16_t>(), words_,
                                            counts_.data<unsigned>() + number);
  }
  // "<what> 3: 2 of 32 words differ", of the first result that differs; "" where none does.
  std::string first(const char* what) const {
    std::vector<unsigned> counts(counts_.bytes() / sizeof(unsigned));
    IKBO_CUDA_CHECK(
        cudaMemcpy(counts.data(), counts_.data(), counts_.bytes(), cudaMemcpyDeviceToHost),
        "counts");
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) {
        return what + (" " + std::to_string(i)) + ": " + std::to_string(counts[i]) + " of " +
               std::to_string(words_) + " words differ";
      }
    }
    return "";
  }

 private:
  GuardedBuffer counts_;
  std::int64_t words_ = 0;
};

// Which of 1000 launches first gives other bits than a launch before them, as text; "" where none
// does. They run in pairs, one after the other with nothing between, into two results; before each
// pair results and workspace are poisoned, so that what a launch does not write or does not wait
// for shows. `launch(void* out)` launches on the default stream and writes all of `out`.
template <typename Launch>
std::string first_difference(const GuardedBuffer& out, const GuardedBuffer& workspace,
                             Launch&& launch) {
  constexpr int kLaunches = 1000;
  const GuardedBuffer expected(out.bytes());
  const GuardedBuffer second(out.bytes());
  DifferenceCounts counts(kLaunches);
  const MemoryHog hog;
  launch(expected.data());
  const GuardedBuffer* const results[] = {&out, &second};
  for (int i = 0; i < kLaunches; i += 2) {
    hog.copy_once();
    workspace.poison();
    for (const GuardedBuffer* result : results) result->poison();
    for (const GuardedBuffer* result : results) launch(result->data());
    for (int j = 0; j < 2; ++j) counts.add(i + j, *results[j], expected);
  }
  return counts.first("launch");
}

// The same of 100 replays of a graph of one launch, with results and workspace poisoned before
// each. `launch(cudaStream_t)` writes all of `out`.
template <typename Launch>
std::string first_different_replay(const GuardedBuffer& out, const GuardedBuffer& workspace,
                                   Launch&& launch) {
  constexpr int kReplays = 100;
  const GuardedBuffer expected(out.bytes());
  DifferenceCounts counts(kReplays);
  out.poison();
  launch(cudaStream_t{});
  IKBO_CUDA_CHECK(cudaMemcpy(expected.data(), out.data(), out.bytes(), cudaMemcpyDeviceToDevice),
                  "expected");

  // A stream that waits for the default stream's work and is waited for.
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  IKBO_CUDA_CHECK(cudaStreamCreate(&stream), "stream");
  IKBO_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  launch(stream);
  IKBO_CUDA_CHECK(cudaStreamEndCapture(stream, &graph), "capture");
  IKBO_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0), "graph");
  for (int i = 0; i < kReplays; ++i) {
    workspace.poison();
    out.poison();
    IKBO_CUDA_CHECK(cudaGraphLaunch(replay, stream), "replay");
    counts.add(i, out, expected);
  }
  const std::string difference = counts.first("replay");
  IKBO_CUDA_CHECK(cudaGraphExecDestroy(replay), "graph");
  IKBO_CUDA_CHECK(cudaGraphDestroy(graph), "graph");
  IKBO_CUDA_CHECK(cudaStreamDestroy(stream), "stream");
  return difference;
}

}  // namespace ikbo::test
