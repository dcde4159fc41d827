// SPDX-License-Identifier: Apache-2.0
#include "runtime/checks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

void check_range(const Manifest& manifest, const char* what, std::int64_t value, std::int64_t low,
                 std::int64_t high) {
  IKBO_CHECK(value >= low && value <= high, "model ", manifest.model_name, ": ", what,
             " must be in [", low, ", ", high, "]; got ", value);
}

void check_sizes(const Manifest& manifest, std::int64_t num_users, std::int64_t num_candidates) {
  check_range(manifest, "the number of users", num_users, manifest.has_users() ? 1 : 0,
              manifest.max_users);
  check_range(manifest, "the number of candidates", num_candidates, 0, manifest.max_candidates);
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
  const std::size_t bytes = static_cast<std::size_t>(rows) * spec.row_bytes();
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

// Throws unless every element is in [0, limit). One pass that vectorises; the position is looked up
// only when a value is out of range.
template <typename T>
void check_values(const Manifest& manifest, const TensorSpec& spec, const TensorView& tensor,
                  std::int64_t limit, const char* meaning) {
  const std::size_t count = tensor.bytes / sizeof(T);
  T low = std::numeric_limits<T>::max();
  T high = std::numeric_limits<T>::min();
  for (std::size_t i = 0; i < count; ++i) {
    const T value = load<T>(tensor.data, i);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (count == 0 || (low >= 0 && high < limit)) {
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t value = load<T>(tensor.data, i);
    IKBO_CHECK(value >= 0 && value < limit, "model ", manifest.model_name, ": input ", spec.name,
               " must hold ", meaning, " in [0, ", limit, "); got ", value, " at position ", i);
  }
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
                  const std::vector<TensorView>& tensors, AbsentIndex absent_index) {
  check_sizes(manifest, num_users, num_candidates);
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
    if (spec.role == Role::kIndex) {
      check_values<std::int32_t>(manifest, spec, tensors[i], num_users, "row numbers of users");
    } else if (spec.dtype == DType::kBool) {
      check_values<std::uint8_t>(manifest, spec, tensors[i], 2, "bytes");
    }
  }
}

}  // namespace ikbo::runtime
