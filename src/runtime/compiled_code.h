// SPDX-License-Identifier: Apache-2.0
// What the compiled code of a package says of itself, held against its manifest.
#pragma once

#include "runtime/archive.h"
#include "runtime/executor.h"

namespace ikbo::runtime {

// Throws ikbo::Error naming the archive unless it holds the compiled code of `program`, for its
// manifest's device, compiled for inputs of the manifest's dtypes and shapes, whose ikbo operators
// the manifest lists.
void check_compiled_code(const Archive& archive, const Program& program);

}  // namespace ikbo::runtime
