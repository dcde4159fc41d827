// SPDX-License-Identifier: Apache-2.0
// A linear layer over [user, candidate] whose user part is computed once per user:
//
//   out[b] = act(w_cand x_cand[b] + (w_user x_user + bias)[cand_to_user[b]])
//
// Products are summed in fp32, the user term is added and the activation applied in fp32, and the
// result is rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ikbo/activation.h"
#include "ikbo/device_limits.h"
#include "ikbo/stream.h"
#include "ikbo/types.h"

namespace ikbo {

struct LinearParams {
  // Sizes. num_users is U, num_candidates is B.
  std::int32_t num_users = 0;
  std::int32_t num_candidates = 0;
  std::int32_t m = 0;
  std::int32_t k_user = 0;
  std::int32_t k_cand = 0;
  DType dtype = DType::kFloat16;  // of every tensor but the index
  Activation activation = Activation::kNone;

  // Inputs, aligned to their element size.
  const void* x_user = nullptr;  // [U, K_user]
  const void* x_cand = nullptr;  // [B, K_cand]
  const void* w_user = nullptr;  // [M, K_user]
  const void* w_cand = nullptr;  // [M, K_cand]
  const void* bias = nullptr;    // [M] contiguous; may be nullptr

  // NOTE: values are not checked on the device. An index outside [0, U) reads outside the user
  // part; callers check it (CandidateIndex, Session).
  const std::int32_t* cand_to_user = nullptr;  // [B]

  void* out = nullptr;  // [B, M] contiguous

  // Strides in elements.
  std::int64_t stride_x_user_u = 0;
  std::int64_t stride_x_user_k = 1;
  std::int64_t stride_x_cand_b = 0;
  std::int64_t stride_x_cand_k = 1;
  std::int64_t stride_w_user_m = 0;
  std::int64_t stride_w_user_k = 1;
  std::int64_t stride_w_cand_m = 0;
  std::int64_t stride_w_cand_k = 1;

  void* workspace =
      nullptr;  // linear_workspace_bytes() bytes, 256-byte aligned; contents do not matter
};

enum class LinearKernel : std::int8_t {
  kSm90,  // warp-specialised TMA + wgmma
  kSimt,  // any architecture, any stride, any alignment
};

// How one stage (user or candidate) of the sm_90a kernel covers its rows x M outputs.
struct LinearTiling {
  int tile_rows = 0;  // 64 or 128
  int tile_m = 0;     // 64 with 64 rows; else 64, 128, 160, 192, 224 or 256
  int split_k = 1;    // CTAs that share one tile's sum
};

// How the sm_90a kernel gets rows of a matrix into shared memory.
enum class LinearFeed : std::int8_t {
  kTma,      // by the copy engine: rows at multiples of 16 bytes
  kAsync,    // by asynchronous copies of 4 bytes: rows at multiples of 4 bytes
  kElement,  // one element at a time
  kCopied,   // by the copy engine, from an aligned copy in the workspace; weights alone
};

struct LinearConfig {
  LinearKernel kernel = LinearKernel::kSimt;
  LinearTiling user;
  LinearTiling candidate;
  LinearFeed x_user = LinearFeed::kTma;
  LinearFeed x_cand = LinearFeed::kTma;
  LinearFeed w_user = LinearFeed::kTma;
  LinearFeed w_cand = LinearFeed::kTma;
};

std::string to_string(const LinearConfig& config);

// Pure: depends on its arguments alone.
LinearConfig select_linear_config(const LinearParams& params, const DeviceLimits& limits);

// Bytes of workspace that linear() needs for `params` under `config`.
std::size_t linear_workspace_bytes(const LinearParams& params, const LinearConfig& config);

// Launches the kernels on `stream`; no host synchronisation, no allocation: safe under CUDA graph
// capture, and on several streams at once with one workspace each. Throws ikbo::Error when the
// launch fails.
void linear(const LinearParams& params, const LinearConfig& config, const DeviceLimits& limits,
            Stream stream);

}  // namespace ikbo
