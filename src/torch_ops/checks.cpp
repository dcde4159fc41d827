// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/checks.h"

#include <torch/csrc/stable/device.h>

#include <algorithm>
#include <sstream>

namespace ikbo::ops {
namespace {

std::string device_text(const Tensor& tensor) {
  const torch::stable::Device device = tensor.device();
  std::ostringstream text;
  if (device.is_cpu()) {
    text << "cpu";
  } else if (device.is_cuda()) {
    text << "cuda";
  } else {
    text << "device type " << static_cast<int>(device.type());
  }
  if (device.index() >= 0) {
    text << ":" << device.index();
  }
  return text.str();
}

std::string sizes_text(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return list_text({sizes.begin(), sizes.end()});
}

bool is_supported_float(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float ||
         dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

}  // namespace

std::string dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

std::string list_text(const std::vector<int64_t>& values) {
  std::ostringstream text;
  text << "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text << (i == 0 ? "" : ", ") << values[i];
  }
  text << "]";
  return text.str();
}

void check_devices(const char* op, const std::vector<Named>& tensors) {
  const Named& first = tensors.front();
  for (const Named& other : tensors) {
    STD_TORCH_CHECK(other.tensor.device() == first.tensor.device(), "ikbo::", op, ": ", other.name,
                    " must be on the device of ", first.name, ", ", device_text(first.tensor),
                    "; got ", device_text(other.tensor));
  }
}

void check_float_dtypes(const char* op, const std::vector<Named>& tensors) {
  const Named& first = tensors.front();
  const ScalarType dtype = first.tensor.scalar_type();
  STD_TORCH_CHECK(is_supported_float(dtype), "ikbo::", op, ": ", first.name,
                  " must be float64, float32, bfloat16 or float16; got ", dtype_text(dtype));
  for (const Named& other : tensors) {
    STD_TORCH_CHECK(other.tensor.scalar_type() == dtype, "ikbo::", op, ": ", other.name,
                    " must have the dtype of ", first.name, ", ", dtype_text(dtype), "; got ",
                    dtype_text(other.tensor.scalar_type()), "; convert one with .to()");
  }
}

void check_dtype(const char* op, const Named& tensor, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.tensor.scalar_type() == dtype, "ikbo::", op, ": ", tensor.name,
                  " must be ", dtype_text(dtype), "; got ", dtype_text(tensor.tensor.scalar_type()),
                  "; convert it with .to(torch.", dtype_text(dtype), ")");
}

void check_rank(const char* op, const Named& tensor, int64_t rank, const char* layout) {
  STD_TORCH_CHECK(tensor.tensor.dim() == rank, "ikbo::", op, ": ", tensor.name, " must have rank ",
                  rank, ", ", layout, "; got rank ", tensor.tensor.dim(), " with sizes ",
                  sizes_text(tensor.tensor));
}

void check_shape(const char* op, const Named& tensor, std::initializer_list<Dim> dims) {
  const bool is_equal = std::equal(dims.begin(), dims.end(), tensor.tensor.sizes().begin(),
                                   [](const Dim& dim, int64_t size) { return dim.size == size; });
  if (is_equal) {
    return;
  }
  std::ostringstream expected;
  for (const Dim& dim : dims) {
    expected << (&dim == dims.begin() ? "[" : ", ") << dim.letter << " = " << dim.size;
  }
  STD_TORCH_CHECK(false, "ikbo::", op, ": ", tensor.name, " must have sizes ", expected.str(),
                  "]; got ", sizes_text(tensor.tensor));
}

Activation checked_activation(const char* op, const std::string& name) {
  const std::optional<Activation> activation = parse_activation(name);
  STD_TORCH_CHECK(activation.has_value(), "ikbo::", op, ": activation must be one of ",
                  kActivationNames, "; got '", name, "'");
  return *activation;
}

}  // namespace ikbo::ops
