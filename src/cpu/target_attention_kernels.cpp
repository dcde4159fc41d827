// SPDX-License-Identifier: Apache-2.0
// Compiled once per instruction set, with IKBO_ISA naming it (src/cpu/CMakeLists.txt). Nothing here
// may define an inline function or a template of another namespace: the linker would keep one copy
// for all instruction sets.
#include "cpu/target_attention_kernels.h"

#include "cpu/target_attention_backward.h"
#include "cpu/target_attention_forward.h"

namespace ikbo::cpu::IKBO_ISA {
namespace {

template <class T>
std::int64_t forward_scratch_bytes(const TargetAttentionParams& params,
                                   const TargetAttentionConfig& config) {
  Carver<T> carver(nullptr);
  ForwardScratch<T>(carver, config.row_tile, config.key_block, params.head_dim);
  return carver.used_bytes();
}

template <class T>
std::int64_t backward_scratch_bytes(const TargetAttentionParams& params,
                                    const TargetAttentionConfig& config) {
  Carver<T> carver(nullptr);
  BackwardScratch<T>(carver, config.row_tile, config.key_block, params.head_dim, params.num_keys);
  return carver.used_bytes();
}

template <class T, class Storage>
inline constexpr TargetAttentionKernels kKernels = {
    .forward_scratch_bytes = forward_scratch_bytes<T>,
    .forward = forward_task<T, Storage>,
    .backward_scratch_bytes = backward_scratch_bytes<T>,
    .backward = backward_task<T, Storage>,
};

}  // namespace

const TargetAttentionKernels& target_attention_kernels(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return kKernels<double, double>;
    case DType::kFloat16:
      return kKernels<float, Half>;
    case DType::kBFloat16:
      return kKernels<float, BFloat16>;
    default:
      return kKernels<float, float>;
  }
}

}  // namespace ikbo::cpu::IKBO_ISA
