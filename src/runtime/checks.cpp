// SPDX-License-Identifier: Apache-2.0
#include "runtime/checks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

void check_range(const Manifest& manifest, const char* what, std::int64_t value, std::int64_t low,
                 std::int64_t high) {
  IKBO_CHECK(value >= low && value <= high, "model ", manifest.model_name, ": ", what,
             " must be in [", low, ", ", high, "]; got ", value);
}

void check_sizes(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates,
                 Sizes sizes) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const bool is_run = sizes == Sizes::kOfOneRun;
  const std::int64_t max_users = is_run || !manifest.has_users() ? manifest.max_users : kMost;
  check_range(manifest, "the number of users", num_users, manifest.has_users() ? 1 : 0, max_users);
  check_range(manifest, "the number of candidates", num_candidates, 0,
              is_run ? manifest.max_candidates : kMost);
}

void check_layout(const Manifest& manifest, const TensorSpec& spec, const TensorView& tensor,
                  std::int64_t rows) {
  IKBO_CHECK(!tensor.is_absent(), "model ", manifest.model_name, ": input ", spec.name,
             " must be given; got none");
  IKBO_CHECK(tensor.dtype == spec.dtype, "model ", manifest.model_name, ": input ", spec.name,
             " must have dtype ", name_of(spec.dtype), "; got ", name_of(tensor.dtype));
  Shape shape = spec.shape;
  shape[0] = rows;
  IKBO_CHECK(tensor.shape == shape, "model ", manifest.model_name, ": input ", spec.name,
             " must have shape ", text_of(shape), "; got ", text_of(tensor.shape));
  std::size_t bytes = 0;
  const bool is_countable =
      !__builtin_mul_overflow(static_cast<std::size_t>(rows), spec.row_bytes(), &bytes);
  IKBO_CHECK(is_countable, "model ", manifest.model_name, ": input ", spec.name,
             " must have fewer than 2^64 bytes; got shape ", text_of(shape));
  IKBO_CHECK(tensor.bytes == bytes, "model ", manifest.model_name, ": input ", spec.name,
             " must have ", bytes, " bytes (shape ", text_of(shape), ", ", name_of(spec.dtype),
             "); got ", tensor.bytes);
  IKBO_CHECK(tensor.data != nullptr || bytes == 0, "model ", manifest.model_name, ": input ",
             spec.name, " must have data; got a null pointer");
}

template <typename T>
T load(const void* data, std::size_t position) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + position * sizeof(T), sizeof(T));
  return value;
}

// Throws unless every element is in `range`. One pass that vectorises; the position is looked up
// only when there is a value to report.
template <typename T>
void check_elements(const Manifest& manifest, const TensorSpec& spec, const TensorView& tensor,
                    const ValueRange& range) {
  const std::size_t count = tensor.bytes / sizeof(T);
  T min = std::numeric_limits<T>::max();
  T max = std::numeric_limits<T>::min();
  for (std::size_t i = 0; i < count; ++i) {
    const T value = load<T>(tensor.data, i);
    min = std::min(min, value);
    max = std::max(max, value);
  }
  if (count == 0 || (min >= range.min && max <= range.max)) {
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const T value = load<T>(tensor.data, i);
    IKBO_CHECK(value >= range.min && value <= range.max, "model ", manifest.model_name, ": input ",
               spec.name, " must have values in [", range.min, ", ", range.max, "]; got ", +value,
               " at position ", i);
  }
}

void check_values(const Manifest& manifest, const TensorSpec& spec, const TensorView& tensor,
                  const ValueRange& range) {
  switch (spec.dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return check_elements<std::uint8_t>(manifest, spec, tensor, range);
    case DType::kInt8:
      return check_elements<std::int8_t>(manifest, spec, tensor, range);
    case DType::kInt16:
      return check_elements<std::int16_t>(manifest, spec, tensor, range);
    case DType::kInt32:
      return check_elements<std::int32_t>(manifest, spec, tensor, range);
    case DType::kInt64:
      return check_elements<std::int64_t>(manifest, spec, tensor, range);
    default:
      IKBO_UNREACHABLE("a value range of a floating-point tensor");
  }
}

std::optional<ValueRange> range_of(const TensorSpec& spec, std::int64_t num_users) {
  if (spec.role == Role::kIndex) {
    return ValueRange{0, num_users - 1};
  }
  if (spec.dtype == DType::kBool) {
    return ValueRange{0, 1};
  }
  return spec.values;
}

}  // namespace

std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

void check_inputs(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates,
                  const std::vector<TensorView>& tensors, AbsentIndex absent_index, Sizes sizes) {
  check_sizes(manifest, num_users, num_candidates, sizes);
  IKBO_CHECK(tensors.size() == manifest.inputs.size(), "model ", manifest.model_name,
             ": must be given ", manifest.inputs.size(), " inputs; got ", tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = manifest.inputs[i];
    if (spec.role == Role::kIndex && tensors[i].is_absent() &&
        absent_index == AbsentIndex::kForOneUser) {
      IKBO_CHECK(num_users == 1, "model ", manifest.model_name, ": input ", spec.name,
                 " may be left out only when there is one user; got ", num_users, " users");
      continue;
    }
    check_layout(manifest, spec, tensors[i], num_rows(spec.role, num_users, num_candidates));
    if (const std::optional<ValueRange> range = range_of(spec, num_users)) {
      check_values(manifest, spec, tensors[i], *range);
    }
  }
}

void check_outputs(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates,
                   const std::vector<Tensor>& outputs) {
  IKBO_CHECK(outputs.size() == manifest.outputs.size(), "model ", manifest.model_name,
             ": the compiled code must return ", manifest.outputs.size(), " outputs; got ",
             outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const TensorSpec& spec = manifest.outputs[i];
    Shape shape = spec.shape;
    shape[0] = num_rows(spec.role, num_users, num_candidates);
    IKBO_CHECK(outputs[i].dtype == spec.dtype && outputs[i].shape == shape, "model ",
               manifest.model_name, ": output ", spec.name, " must be ", name_of(spec.dtype), " ",
               text_of(shape), " as the manifest says; the compiled code returned ",
               name_of(outputs[i].dtype), " ", text_of(outputs[i].shape));
  }
}

}  // namespace ikbo::runtime
