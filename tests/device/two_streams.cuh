// SPDX-License-Identifier: Apache-2.0
// Calls on one stream beside the replays of a graph on another.
#pragma once

#include <gtest/gtest.h>

#include "device_memory.h"
#include "kernels/host/cuda_check.h"

namespace ikbo::test {

// Both come to what they come to alone. A Run can be called with a stream; `result` is what it
// comes to, `read_back` the same of the calls so far, and `poison` overwrites that.
template <typename Run>
void expect_no_change_by_the_other(Run& one, Run& two) {
  const auto expect_one = one.result();
  const auto expect_two = two.result();
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    IKBO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  IKBO_CUDA_CHECK(cudaStreamBeginCapture(streams[1], cudaStreamCaptureModeThreadLocal), "capture");
  two(streams[1]);
  IKBO_CUDA_CHECK(cudaStreamEndCapture(streams[1], &graph), "capture");
  IKBO_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0), "graph");
  one.poison();
  two.poison();
  IKBO_CUDA_CHECK(cudaDeviceSynchronize(), "poison");
  for (int i = 0; i < 100; ++i) {
    one(streams[0]);
    IKBO_CUDA_CHECK(cudaGraphLaunch(replay, streams[1]), "replay");
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(expect_one, one.read_back());
  EXPECT_EQ(expect_two, two.read_back());
  IKBO_CUDA_CHECK(cudaGraphExecDestroy(replay), "graph");
  IKBO_CUDA_CHECK(cudaGraphDestroy(graph), "graph");
  for (cudaStream_t stream : streams) IKBO_CUDA_CHECK(cudaStreamDestroy(stream), "stream");
}

}  // namespace ikbo::test
