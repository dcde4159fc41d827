// SPDX-License-Identifier: Apache-2.0
// Whether inputs and outputs of a run fit a manifest: the checks that requests and runs share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ikbo/runtime/manifest.h"

namespace ikbo::runtime {

// "[3, 64]"
std::string text_of(const Shape& shape);

enum class AbsentIndex : std::int8_t {
  kRefused,
  kForOneUser,  // may be left out when there is one user
};

enum class Sizes : std::int8_t {
  kOfOneRun,  // within the package's range
  kAny,       // up to what an int32 can count
};

// Throws ikbo::Error naming the model, the input, the requirement and the value: sizes, then for
// each tensor dtype, rank, extents and byte count, then its values: row numbers of users in the
// index, 0 and 1 in bool tensors, the manifest's range where it gives one. Data may have any
// alignment.
void check_inputs(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates,
                  const std::vector<TensorView>& tensors, AbsentIndex absent_index,
                  Sizes sizes = Sizes::kOfOneRun);

// Throws ikbo::Error unless compiled code returned what the manifest says, for a run of those
// sizes: a package is code from elsewhere.
void check_outputs(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates,
                   const std::vector<Tensor>& outputs);

}  // namespace ikbo::runtime
