// SPDX-License-Identifier: Apache-2.0
// Linear compression of embeddings (LCE) with the user part computed once per user:
//
//   out[b] = w_cand e_cand[b] + (w_user e_user + bias)[cand_to_user[b]]
//
// Products are summed in fp32, the user term is added in fp32, and the result is rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ikbo/device_limits.h"
#include "ikbo/stream.h"
#include "ikbo/types.h"

namespace ikbo {

// One of the tensors that the candidate side may consist of.
struct LcePart {
  const void* e = nullptr;  // [B, K_i, N]
  std::int32_t k = 0;       // K_i
  std::int64_t stride_b = 0;
  std::int64_t stride_k = 0;
  std::int64_t stride_n = 1;
};

struct LceParams {
  // Sizes. num_users is U, num_candidates is B.
  std::int32_t num_users = 0;
  std::int32_t num_candidates = 0;
  std::int32_t m = 0;
  std::int32_t n = 0;
  std::int32_t k_user = 0;
  std::int32_t k_cand = 0;
  DType dtype = DType::kFloat16;  // of every tensor but the index

  // Inputs. The last dimension of each is contiguous unless a stride says otherwise.
  const void* e_user = nullptr;         // [U, K_user, N]
  const void* e_cand = nullptr;         // [B, K_cand, N]
  const void* w_user = nullptr;         // [M, K_user]
  const void* w_cand = nullptr;         // [M, K_cand]
  const void* w_user_packed = nullptr;  // lce_pack() of w_user; may be nullptr: packed on the fly
  const void* w_cand_packed = nullptr;  // lce_pack() of w_cand; may be nullptr: packed on the fly
  const void* bias = nullptr;           // [M]; may be nullptr

  // Where the candidate side is a list, in host memory: these stand for e_cand and its strides, the
  // columns of w_cand follow the list, and k_cand is the sum of the K_i. Only kSm90 takes a list,
  // of at most lce_max_parts tensors.
  const LcePart* cand_parts = nullptr;
  std::int32_t num_cand_parts = 0;

  // NOTE: values are not checked on the device, unless the library was built with
  // IKBO_CHECK_INDICES. One outside [0, U) reads outside the user part; callers check it
  // (CandidateIndex, Session).
  const std::int32_t* cand_to_user = nullptr;  // [B]

  void* out = nullptr;  // [B, M, N] contiguous

  // Strides in elements.
  std::int64_t stride_e_user_u = 0;
  std::int64_t stride_e_user_k = 0;
  std::int64_t stride_e_user_n = 1;
  std::int64_t stride_e_cand_b = 0;
  std::int64_t stride_e_cand_k = 0;
  std::int64_t stride_e_cand_n = 1;
  std::int64_t stride_w_user_m = 0;
  std::int64_t stride_w_user_k = 1;
  std::int64_t stride_w_cand_m = 0;
  std::int64_t stride_w_cand_k = 1;

  void* workspace =
      nullptr;  // lce_workspace_bytes() bytes, 256-byte aligned; contents do not matter
};

inline constexpr std::int32_t lce_max_parts = 32;

enum class LceKernel : std::int8_t {
  kSm90,  // warp-specialised TMA + wgmma, persistent
  kMma,   // tensor cores of compute capability 8.0 and newer: 16-bit types, any stride, any size
  kSimt,  // fp32 on compute capability 8.0 and newer: any stride, any size
};

struct LceConfig {
  LceKernel kernel = LceKernel::kSimt;
  int tile_m = 0;       // rows of M per tile; kMma: the candidate stage's
  int user_tile_m = 0;  // kMma: rows of M per tile of the user stage
  int num_tiles_m = 0;  // tiles that cover M
  int user_units_per_cta = 1;
  bool dual_k = false;  // kSm90: no user stage, each candidate multiplies its user's rows as well
};

std::string to_string(const LceConfig& config);

// Pure: depends on its arguments alone.
LceConfig select_lce_config(const LceParams& params, const DeviceLimits& limits);

// Bytes of workspace that lce() needs for `params` under `config`.
std::size_t lce_workspace_bytes(const LceParams& params, const LceConfig& config);

// The tiles that select_lce_config chooses for M where a call has a packed weight; kSimt where no
// kernel takes one. For packing a weight before the other sizes of its calls are known.
LceConfig select_lce_pack_config(int m, DType dtype, const DeviceLimits& limits);

// Bytes of a packed weight with k columns under `config`; 0 when the kernel reads the weight as it
// is.
std::size_t lce_packed_bytes(int k, const LceConfig& config);

// k filled up to whole blocks of a packed weight.
int lce_padded_k(int k);

// Writes the packed form of w [M, k] (strides in elements) to `packed`. Asynchronous on `stream`.
void lce_pack(const void* w, std::int64_t stride_m, std::int64_t stride_k, int m, int k,
              DType dtype, const LceConfig& config, void* packed, Stream stream);

// Launches the kernels on `stream`; no host synchronisation, no allocation: safe under CUDA graph
// capture, and on several streams at once with one workspace each. Throws ikbo::Error when the
// launch fails.
void lce(const LceParams& params, const LceConfig& config, const DeviceLimits& limits,
         Stream stream);

}  // namespace ikbo
