// SPDX-License-Identifier: Apache-2.0
#include "runtime/gpu_staging.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <utility>

namespace ikbo::runtime {
namespace {

// A tensor of a block.
at::Tensor view_in(const at::Tensor& block, const TensorSpec& spec, RunSize size,
                   std::size_t offset) {
  Shape shape = spec.shape;
  shape[0] = num_rows(spec.role, size.num_users, size.num_candidates);
  const std::size_t bytes = static_cast<std::size_t>(shape[0]) * spec.row_bytes();
  return block.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(bytes))
      .view(to_torch(spec.dtype))
      .view(shape);
}

void grow(at::Tensor& block, std::size_t bytes, const at::TensorOptions& options) {
  const auto size = static_cast<std::int64_t>(std::bit_ceil(bytes));
  if (!block.defined() || block.size(0) < size) {
    block = at::Tensor();  // before there is another
    block = at::empty({size}, options);
  }
}

}  // namespace

void Staging::reserve(const Manifest& manifest, RunSize size) {
  inputs_ = layout_of(manifest.inputs, size);
  outputs_ = layout_of(manifest.outputs, size);
  const at::TensorOptions bytes(at::kByte);
  grow(pinned_inputs_, inputs_.bytes, bytes.pinned_memory(true));
  grow(gpu_inputs_, inputs_.bytes, bytes.device(gpu()));
  grow(pinned_outputs_, outputs_.bytes, bytes.pinned_memory(true));
}

std::byte* Staging::input_bytes() const {
  return static_cast<std::byte*>(pinned_inputs_.mutable_data_ptr());
}

const std::byte* Staging::output_bytes() const {
  return static_cast<const std::byte*>(pinned_outputs_.const_data_ptr());
}

void Staging::enqueue(const CompiledModel& model, RunSize size) const {
  const Manifest& manifest = model.manifest();
  const auto input_bytes = static_cast<std::int64_t>(inputs_.bytes);
  gpu_inputs_.narrow(0, 0, input_bytes)
      .copy_(pinned_inputs_.narrow(0, 0, input_bytes), /*non_blocking=*/true);
  std::vector<at::Tensor> inputs;
  inputs.reserve(manifest.inputs.size());
  for (std::size_t i = 0; i < manifest.inputs.size(); ++i) {
    inputs.push_back(view_in(gpu_inputs_, manifest.inputs[i], size, inputs_.offsets[i]));
  }
  const std::vector<at::Tensor> results = model.run(std::move(inputs));
  for (std::size_t i = 0; i < results.size(); ++i) {
    const TensorSpec& spec = manifest.outputs[i];
    const at::Tensor output = view_in(pinned_outputs_, spec, size, outputs_.offsets[i]);
    IKBO_CHECK(results[i].sizes() == output.sizes(), "model ", manifest.model_name, ": output ",
               spec.name, " must have shape ", output.sizes(),
               " as the manifest says; the compiled code returned ", results[i].sizes());
    output.copy_(results[i], /*non_blocking=*/true);
  }
}

}  // namespace ikbo::runtime
