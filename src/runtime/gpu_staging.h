// SPDX-License-Identifier: Apache-2.0
// Where inputs and outputs of a session's runs lie, on the host and on the GPU.
#pragma once

#include "runtime/aoti_model.h"
#include "runtime/run_blocks.h"

namespace ikbo::runtime {

// Of one run at a time.
class Staging {
 public:
  // Room for a run of that size. Blocks that are too small are replaced by some of the next power
  // of two: what has their addresses must be gone by then.
  void reserve(const Manifest& manifest, RunSize size);

  const BlockLayout& inputs() const { return inputs_; }
  const BlockLayout& outputs() const { return outputs_; }
  std::byte* input_bytes() const;
  const std::byte* output_bytes() const;

  // Enqueues, on the thread's current stream, everything of a run of the size that there is room
  // for: from the inputs to the outputs. Throws ikbo::Error when the compiled code returns what the
  // manifest does not say.
  void enqueue(const CompiledModel& model, RunSize size) const;

 private:
  BlockLayout inputs_;
  BlockLayout outputs_;
  at::Tensor pinned_inputs_;
  at::Tensor gpu_inputs_;
  at::Tensor pinned_outputs_;
};

}  // namespace ikbo::runtime
