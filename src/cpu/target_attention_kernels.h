// SPDX-License-Identifier: Apache-2.0
// The kernels of target attention as the plan's side sees them: one table per instruction set.
#pragma once

#include <cstddef>

#include "ikbo/target_attention.h"

namespace ikbo::cpu {

// Rows of a task at most: their queries and sums (D = 64) stay in the second-level cache beside a
// block of keys. 64, 96 and 128 rows are within 5 % (AMD EPYC, Zen 5, 2026-11).
inline constexpr std::int32_t kMaxRowTile = 96;

// All entries take the scratch memory of one thread, 64-byte aligned, of `*_scratch_bytes`.
struct TargetAttentionKernels {
  std::int64_t (*forward_scratch_bytes)(const TargetAttentionParams& params,
                                        const TargetAttentionConfig& config);
  void (*forward)(const TargetAttentionParams& params, const TargetAttentionTask& task,
                  const TargetAttentionConfig& config, void* scratch);
  std::int64_t (*backward_scratch_bytes)(const TargetAttentionParams& params,
                                         const TargetAttentionConfig& config);
  void (*backward)(const TargetAttentionGradParams& params, const TargetAttentionTask& task,
                   const TargetAttentionConfig& config, void* scratch);
};

// By element type. The namespaces are those of target_attention_kernels.cpp's three builds.
namespace x86_64 {
const TargetAttentionKernels& target_attention_kernels(DType dtype);
}
namespace x86_64_v3 {
const TargetAttentionKernels& target_attention_kernels(DType dtype);
}
namespace x86_64_v4 {
const TargetAttentionKernels& target_attention_kernels(DType dtype);
}

}  // namespace ikbo::cpu
