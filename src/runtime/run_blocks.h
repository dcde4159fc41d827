// SPDX-License-Identifier: Apache-2.0
// The tensors of a run side by side in one block of memory, padded to a larger run's size.
#pragma once

#include <cstddef>
#include <vector>

#include "ikbo/runtime/manifest.h"
#include "ikbo/runtime/model.h"
#include "runtime/run_sizes.h"

namespace ikbo::runtime {

// Where each tensor begins. Compiled code may take these addresses to be aligned to 256 bytes.
struct BlockLayout {
  std::vector<std::size_t> offsets;
  std::size_t bytes = 0;  // of the whole block
};

BlockLayout layout_of(const std::vector<TensorSpec>& specs, RunSize size);

// Writes the inputs of a run to `block`, laid out for a run of `size`, which is as large at least.
// Rows that are missing hold zeros, or the least value that the manifest allows where it does not
// allow zero; candidates that are missing belong to the last user of `size`, so that an index that
// ascends still does. `inputs` may have no rows at all.
void write_padded(const std::vector<TensorSpec>& specs, const RunInputs& inputs, RunSize size,
                  const BlockLayout& layout, std::byte* block);

// The first rows of outputs that a run of a larger or the same size left in `block`, each with
// storage of its own.
std::vector<Tensor> copy_rows(const std::vector<TensorSpec>& specs, RunSize size,
                              const BlockLayout& layout, const std::byte* block);

// Inputs as of clients that say nothing: no rows, of which write_padded makes all, and then the
// candidates shared out among the users in turn.
void write_made_up(const std::vector<TensorSpec>& specs, RunSize size, const BlockLayout& layout,
                   std::byte* block);

}  // namespace ikbo::runtime
