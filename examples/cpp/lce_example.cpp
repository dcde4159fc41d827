// SPDX-License-Identifier: Apache-2.0
// ikbo::lce on device buffers of our own, without PyTorch: 8 users, 512 candidates in any order,
// the candidate weight packed once. Compares every element with a loop on the CPU and prints the
// time of a call.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <vector>

#include "ikbo/lce.h"

namespace {

constexpr int kUsers = 8;
constexpr int kCandidates = 512;
constexpr int kM = 113;
constexpr int kN = 64;
constexpr int kKUser = 301;
constexpr int kKCand = 211;
constexpr int kTimedCalls = 100;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) { check(cudaMalloc(&data_, bytes)); }
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Row-major values on the host, as the device has them.
using Halves = std::vector<__half>;

Halves random_halves(std::size_t count, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, scale);
  Halves values(count);
  for (__half& value : values) value = __float2half(normal(random));
  return values;
}

struct Inputs {
  Halves e_user;  // [U, K_user, N]
  Halves e_cand;  // [B, K_cand, N]
  Halves w_user;  // [M, K_user]
  Halves w_cand;  // [M, K_cand]
  Halves bias;    // [M]
  std::vector<std::int32_t> cand_to_user;
};

Inputs make_inputs() {
  std::mt19937 random(1);
  Inputs in{.e_user = random_halves(kUsers * kKUser * kN, 1.0f, random),
            .e_cand = random_halves(kCandidates * kKCand * kN, 1.0f, random),
            .w_user = random_halves(kM * kKUser, 0.05f, random),
            .w_cand = random_halves(kM * kKCand, 0.05f, random),
            .bias = random_halves(kM, 1.0f, random),
            .cand_to_user = std::vector<std::int32_t>(kCandidates)};
  for (std::int32_t& user : in.cand_to_user) user = static_cast<std::int32_t>(random() % kUsers);
  return in;
}

// w [M, k] times e[batch] [k, N], added to sum [M, N].
void add_product(const Halves& w, const Halves& e, std::size_t batch, std::size_t num_k,
                 std::vector<float>& sum) {
  for (std::size_t m = 0; m < kM; ++m) {
    for (std::size_t k = 0; k < num_k; ++k) {
      const float weight = __half2float(w[m * num_k + k]);
      for (std::size_t n = 0; n < kN; ++n) {
        sum[m * kN + n] += weight * __half2float(e[(batch * num_k + k) * kN + n]);
      }
    }
  }
}

// The largest error relative to 1 + |expected|, over all elements.
double worst_error(const Inputs& in, const Halves& out) {
  double worst = 0.0;
  for (std::size_t b = 0; b < kCandidates; ++b) {
    std::vector<float> expected(kM * kN);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = __half2float(in.bias[i / kN]);
    add_product(in.w_user, in.e_user, static_cast<std::size_t>(in.cand_to_user[b]), kKUser,
                expected);
    add_product(in.w_cand, in.e_cand, b, kKCand, expected);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double error = std::fabs(__half2float(out[b * kM * kN + i]) - expected[i]);
      // A NaN must not pass: this way round it counts.
      if (!(error <= worst * (1.0 + std::fabs(expected[i])))) {
        worst = error / (1.0 + std::fabs(expected[i]));
        if (std::isnan(worst)) return worst;
      }
    }
  }
  return worst;
}

float milliseconds_per_call(const ikbo::LceParams& params, const ikbo::LceConfig& config,
                            const ikbo::DeviceLimits& limits, cudaStream_t stream) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin, stream));
  for (int i = 0; i < kTimedCalls; ++i) ikbo::lce(params, config, limits, stream);
  check(cudaEventRecord(end, stream));
  check(cudaEventSynchronize(end));
  float total = 0.0f;
  check(cudaEventElapsedTime(&total, begin, end));
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return total / kTimedCalls;
}

int run() {
  const Inputs in = make_inputs();
  const DeviceBuffer e_user(in.e_user);
  const DeviceBuffer e_cand(in.e_cand);
  const DeviceBuffer w_user(in.w_user);
  const DeviceBuffer w_cand(in.w_cand);
  const DeviceBuffer bias(in.bias);
  const DeviceBuffer cand_to_user(in.cand_to_user);
  Halves out(static_cast<std::size_t>(kCandidates) * kM * kN);
  const DeviceBuffer device_out(out.size() * sizeof(__half));

  ikbo::LceParams params{.num_users = kUsers,
                         .num_candidates = kCandidates,
                         .m = kM,
                         .n = kN,
                         .k_user = kKUser,
                         .k_cand = kKCand,
                         .dtype = ikbo::DType::kFloat16,
                         .e_user = e_user.data(),
                         .e_cand = e_cand.data(),
                         .w_user = w_user.data(),
                         .w_cand = w_cand.data(),
                         .bias = bias.data(),
                         .cand_to_user = static_cast<const std::int32_t*>(cand_to_user.data()),
                         .out = device_out.data(),
                         .stride_e_user_u = kKUser * kN,
                         .stride_e_user_k = kN,
                         .stride_e_cand_b = kKCand * kN,
                         .stride_e_cand_k = kN,
                         .stride_w_user_m = kKUser,
                         .stride_w_cand_m = kKCand};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  const ikbo::DeviceLimits limits = ikbo::query_device_limits(0);
  const ikbo::LceConfig config = ikbo::select_lce_config(params, limits);

  // Where the kernel reads a packed weight: once, not with every call.
  const DeviceBuffer packed(ikbo::lce_packed_bytes(kKCand, config));
  if (packed.data() != nullptr) {
    ikbo::lce_pack(w_cand.data(), kKCand, 1, kM, kKCand, params.dtype, config, packed.data(),
                   stream);
    params.w_cand_packed = packed.data();
  }
  const DeviceBuffer workspace(ikbo::lce_workspace_bytes(params, config));
  params.workspace = workspace.data();

  ikbo::lce(params, config, limits, stream);
  check(cudaStreamSynchronize(stream));
  check(cudaMemcpy(out.data(), device_out.data(), out.size() * sizeof(__half),
                   cudaMemcpyDeviceToHost));
  const double error = worst_error(in, out);
  const float time = milliseconds_per_call(params, config, limits, stream);
  check(cudaStreamDestroy(stream));
  std::printf("%s: %.4f ms a call, largest error %.2g of 1 + |value|\n",
              ikbo::to_string(config).c_str(), static_cast<double>(time), error);
  // fp16 keeps 11 bits: half a step is 2^-11 of the value. The rest is for sums in another order.
  return error < 1.0 / 2048 + 1e-4 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
