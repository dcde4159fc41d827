// SPDX-License-Identifier: Apache-2.0
#include "runtime/run_blocks.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t bytes_of(const TensorSpec& spec, RunSize size) {
  const std::int64_t rows = num_rows(spec.role, size.num_users, size.num_candidates);
  return static_cast<std::size_t>(rows) * spec.row_bytes();
}

// The element that missing rows are made of; 0 where the manifest allows it.
std::int64_t padding_of(const TensorSpec& spec, RunSize size) {
  if (spec.role == Role::kIndex) {
    return size.num_users - 1;
  }
  const bool allows_zero =
      !spec.values.has_value() || (spec.values->min <= 0 && spec.values->max >= 0);
  return allows_zero ? 0 : spec.values->min;
}

void write_elements(const TensorSpec& spec, std::int64_t value, std::byte* begin,
                    std::size_t bytes) {
  if (value == 0) {
    std::memset(begin, 0, bytes);
    return;
  }
  // The low bytes of a little-endian integer are the same integer, narrowed.
  const std::size_t element = size_of(spec.dtype);
  for (std::size_t at = 0; at < bytes; at += element) {
    std::memcpy(begin + at, &value, element);
  }
}

}  // namespace

BlockLayout layout_of(const std::vector<TensorSpec>& specs, RunSize size) {
  BlockLayout layout;
  for (const TensorSpec& spec : specs) {
    layout.offsets.push_back(layout.bytes);
    layout.bytes += (bytes_of(spec, size) + kAlignment - 1) / kAlignment * kAlignment;
  }
  return layout;
}

void write_padded(const std::vector<TensorSpec>& specs, const RunInputs& inputs, RunSize size,
                  const BlockLayout& layout, std::byte* block) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    std::byte* begin = block + layout.offsets[i];
    const std::size_t given = inputs.tensors.empty() ? 0 : inputs.tensors[i].bytes;
    if (given > 0) {
      std::memcpy(begin, inputs.tensors[i].data, given);
    }
    const std::size_t missing = bytes_of(specs[i], size) - given;
    write_elements(specs[i], padding_of(specs[i], size), begin + given, missing);
  }
}

std::vector<Tensor> copy_rows(const std::vector<TensorSpec>& specs, RunSize size,
                              const BlockLayout& layout, const std::byte* block) {
  std::vector<Tensor> tensors;
  tensors.reserve(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    OwnedTensor rows =
        allocate_rows(specs[i], num_rows(specs[i].role, size.num_users, size.num_candidates));
    std::memcpy(rows.data, block + layout.offsets[i], rows.tensor.bytes);
    tensors.push_back(std::move(rows.tensor));
  }
  return tensors;
}

void write_made_up(const std::vector<TensorSpec>& specs, RunSize size, const BlockLayout& layout,
                   std::byte* block) {
  write_padded(specs, RunInputs{}, size, layout, block);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].role == Role::kIndex) {
      for (std::int64_t b = 0; b < size.num_candidates; ++b) {
        const auto user = static_cast<std::int32_t>(b * size.num_users / size.num_candidates);
        std::memcpy(block + layout.offsets[i] + static_cast<std::size_t>(b) * sizeof(user), &user,
                    sizeof(user));
      }
    }
  }
}

}  // namespace ikbo::runtime
