// SPDX-License-Identifier: Apache-2.0
// The user's matrix times the candidate's on CUDA, the user's matrix read by index:
//
//   out[b] = a_user[cand_to_user[b]] b_cand[b]
//
// Matrices may be transposed: strides say how they lie. Products are summed in fp32 and rounded
// once. Candidates come in any order; those of one user are computed together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ikbo/device_limits.h"
#include "ikbo/stream.h"
#include "ikbo/types.h"

namespace ikbo {

struct BmmParams {
  // Sizes. num_users is U, num_candidates is B.
  std::int32_t num_users = 0;
  std::int32_t num_candidates = 0;
  std::int32_t p = 0;
  std::int32_t r = 0;
  std::int32_t n = 0;
  DType dtype = DType::kFloat16;  // of every tensor but the index

  // Inputs, aligned to their element size.
  const void* a_user = nullptr;  // [U, P, R]
  const void* b_cand = nullptr;  // [B, R, N]

  // NOTE: values are not checked on the device, unless the library was built with
  // IKBO_CHECK_INDICES. One outside [0, U) reads and writes outside of the tensors; callers check
  // it (CandidateIndex, Session).
  const std::int32_t* cand_to_user = nullptr;  // [B]

  void* out = nullptr;  // [B, P, N] contiguous

  // Strides in elements.
  std::int64_t stride_a_u = 0;
  std::int64_t stride_a_p = 0;
  std::int64_t stride_a_r = 1;
  std::int64_t stride_b_b = 0;
  std::int64_t stride_b_r = 0;
  std::int64_t stride_b_n = 1;
};

enum class BmmKernel : std::int8_t {
  kNone,  // no CUDA kernel takes these params: the composite does
  kSm90,  // warp-specialised wgmma, persistent, the user's matrix resident in shared memory
  kMma,   // tensor cores of compute capability 8.0 and newer: 16-bit types, any stride, any size
  kSimt,  // fp32 on compute capability 8.0 and newer: any stride, any size
};

// The dimension along which a matrix is contiguous.
enum class BmmInner : std::int8_t {
  kSum,  // R
  kOut,  // P of a_user, N of b_cand
};

// How the sm_90a kernel gets a tile of b_cand into shared memory.
enum class BmmFeed : std::int8_t {
  kTma,    // by the copy engine
  kAsync,  // by asynchronous copies of 16 bytes: columns of several candidates in a tile
};

// How it stores a tile of the result.
enum class BmmStore : std::int8_t {
  kTma,      // by the copy engine: a tile is whole boxes of candidates
  kVectors,  // 16 bytes along N
  kAlongP,   // 16 bytes along P: N = 1
};

struct BmmCudaConfig {
  BmmKernel kernel = BmmKernel::kNone;
  // kSm90 alone:
  int tile_p = 0;  // rows of P that stay in shared memory: 64, 128, 192 or 256
  BmmInner a_inner = BmmInner::kSum;
  BmmInner b_inner = BmmInner::kOut;
  BmmFeed feed = BmmFeed::kTma;
  BmmStore store = BmmStore::kTma;
  // The user's matrix is read anew for each pair of tiles, since it does not fit or fills so much
  // of shared memory that tiles would be narrow; slots are blocks of 64 steps of R.
  bool streams_user = false;
  int user_slots = 0;  // matrices of a user in shared memory at a time
  int stages = 0;      // blocks of 64 columns x 64 steps of R in shared memory at a time
};

// "bmm_sm90<tile_p=128,a=r,b=n,feed=tma,store=tma,users=2,stages=6>"; "blocks=4" where the user's
// matrix is streamed
std::string to_string(const BmmCudaConfig& config);

// Pure: reads sizes, strides, dtype and the alignment of the pointers.
BmmCudaConfig select_bmm_cuda_config(const BmmParams& params, const DeviceLimits& limits);

// Bytes of workspace that bmm() needs; 256-byte aligned, contents do not matter.
std::size_t bmm_workspace_bytes(const BmmParams& params, const BmmCudaConfig& config);

// Launches the kernels on `stream`; no host synchronisation, no allocation: safe under CUDA graph
// capture, and on several streams at once with one workspace each. Throws ikbo::Error when the
// launch fails.
void bmm(const BmmParams& params, const BmmCudaConfig& config, const DeviceLimits& limits,
         void* workspace, Stream stream);

}  // namespace ikbo
