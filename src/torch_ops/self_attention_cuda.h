// SPDX-License-Identifier: Apache-2.0
// ikbo::self_target_attention by its CUDA kernel.
#pragma once

#include <optional>

#include "torch_ops/self_attention_args.h"

namespace ikbo::ops {

// Nothing where no kernel takes these arguments. Index values and lengths are not read on the host:
// no synchronisation (ikbo/self_target_attention_cuda.h says what values out of range do).
std::optional<SelfResults> run_self_attention_cuda(const SelfArgs& args);

}  // namespace ikbo::ops
