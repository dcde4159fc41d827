// SPDX-License-Identifier: Apache-2.0
// Three steps in the stream: a kernel finds the first bad row and writes it to memory that the host
// sees, a host function prints it, a kernel traps. A trap ends the CUDA context, so the text must
// be out before it.
#include <climits>
#include <cstdio>
#include <new>
#include <string>

#include "kernels/host/index_check.h"
#include "kernels/host/launch.h"

namespace ikbo::host {
namespace {

constexpr int kThreads = 1024;
constexpr const char* kWhat = "ikbo: check of cand_to_user";

// In pinned memory. `op` is set last, and once: the first report stays.
struct IndexReport {
  std::int32_t row;
  std::int32_t value;
  std::int32_t num_users;
  const char* volatile op;
};

IndexReport* make_report() {
  // The first call may come while its stream is captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  IKBO_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode), kWhat);
  void* memory = nullptr;
  const cudaError_t status =
      cudaHostAlloc(&memory, sizeof(IndexReport), cudaHostAllocMapped | cudaHostAllocPortable);
  IKBO_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode), kWhat);
  IKBO_CUDA_CHECK(status, kWhat);
  return new (memory) IndexReport{};
}

std::string text_of(const IndexReport& report) {
  return std::string("ikbo::") + report.op +
         ": cand_to_user values must be in [0, U) with U = " + std::to_string(report.num_users) +
         "; got cand_to_user[" + std::to_string(report.row) + "] = " + std::to_string(report.value);
}

__global__ void __launch_bounds__(kThreads)
    check_indices_kernel(IndexReport* report, const char* op, const std::int32_t* cand_to_user,
                         std::int32_t num_candidates, std::int32_t num_users) {
  __shared__ int s_first_row;
  if (threadIdx.x == 0) s_first_row = INT_MAX;
  __syncthreads();
  for (std::int64_t b = threadIdx.x; b < num_candidates; b += kThreads) {
    const std::int32_t value = cand_to_user[b];
    if (value < 0 || value >= num_users) {
      atomicMin(&s_first_row, static_cast<int>(b));
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0 || s_first_row == INT_MAX || report->op != nullptr) return;
  report->row = s_first_row;
  report->value = cand_to_user[s_first_row];
  report->num_users = num_users;
  __threadfence_system();
  report->op = op;
}

__global__ void trap_kernel(const IndexReport* report) {
  if (report->op != nullptr) __trap();
}

void print_report(void* memory) {
  const auto& report = *static_cast<const IndexReport*>(memory);
  if (report.op != nullptr) std::fprintf(stderr, "%s\n", text_of(report).c_str());
}

}  // namespace

void check_indices(const char* op, const std::int32_t* cand_to_user, std::int32_t num_candidates,
                   std::int32_t num_users, Stream stream) {
  static IndexReport* const report = make_report();
  IKBO_CHECK(report->op == nullptr, text_of(*report));
  launch(kWhat, check_indices_kernel, {.grid = dim3(1), .threads = kThreads}, stream, report, op,
         cand_to_user, num_candidates, num_users);
  IKBO_CUDA_CHECK(cudaLaunchHostFunc(stream, print_report, report), kWhat);
  launch(kWhat, trap_kernel, {.grid = dim3(1), .threads = 1}, stream, report);
}

}  // namespace ikbo::host
