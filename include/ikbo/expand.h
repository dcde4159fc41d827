// SPDX-License-Identifier: Apache-2.0
// The boundary between users and candidates: out[b] = x_user[cand_to_user[b]], rows of bytes.
#pragma once

#include <cstdint>
#include <string>

#include "ikbo/stream.h"

namespace ikbo {

struct ExpandParams {
  std::int32_t num_users = 0;       // U
  std::int32_t num_candidates = 0;  // B
  std::int64_t row_bytes = 0;       // of one user, contiguous
  std::int64_t user_stride = 0;     // bytes between the rows of two users

  const void* x_user = nullptr;  // [U] rows
  // NOTE: values are not checked on the device, unless the library was built with
  // IKBO_CHECK_INDICES. One outside [0, U) reads outside x_user.
  const std::int32_t* cand_to_user = nullptr;  // [B]
  void* out = nullptr;                         // [B] rows, contiguous
};

struct ExpandConfig {
  int vector_bytes = 0;     // of one access: 16, 8, 4, 2 or 1
  int threads_per_row = 0;  // a power of 2
};

// "expand_gather<bytes=16>".
std::string to_string(const ExpandConfig& config);

// Pure: depends on its arguments alone.
ExpandConfig select_expand_config(const ExpandParams& params);

// Launches on `stream`; no host synchronisation, no allocation: safe under CUDA graph capture.
// Throws ikbo::Error when the launch fails.
void expand(const ExpandParams& params, const ExpandConfig& config, Stream stream);

}  // namespace ikbo
