// SPDX-License-Identifier: Apache-2.0
// The same launch a thousand times, every result compared on the device.
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
  const GuardedBuffer g_counts(kLaunches * sizeof(unsigned));
  IKBO_CUDA_CHECK(cudaMemset(g_counts.data(), 0, g_counts.bytes()), "counts");
  const MemoryHog hog;
  launch(expected.data());
  const GuardedBuffer* const results[] = {&out, &second};
  const auto words = static_cast<std::int64_t>(out.bytes() / 2);
  for (int i = 0; i < kLaunches; i += 2) {
    hog.copy_once();
    workspace.poison();
    for (const GuardedBuffer* result : results) result->poison();
    for (const GuardedBuffer* result : results) launch(result->data());
    for (int j = 0; j < 2; ++j) {
      count_differences_kernel<<<1024, 256>>>(results[j]->data<std::uint16_t>(),
                                              expected.data<std::uint16_t>(), words,
                                              g_counts.data<unsigned>() + i + j);
    }
  }
  std::vector<unsigned> counts(kLaunches);
  IKBO_CUDA_CHECK(
      cudaMemcpy(counts.data(), g_counts.data(), g_counts.bytes(), cudaMemcpyDeviceToHost),
      "counts");
  for (int i = 0; i < kLaunches; ++i) {
    if (counts[i] > 0) {
      return "launch " + std::to_string(i) + ": " + std::to_string(counts[i]) + " of " +
             std::to_string(words) + " words differ";
    }
  }
  return "";
}

}  // namespace ikbo::test
