// SPDX-License-Identifier: Apache-2.0
// Element types by their names on the wire.
#include <array>
#include <utility>

#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

constexpr std::array<std::pair<DType, std::string_view>, 10> kWireNames = {{
    {DType::kBool, "BOOL"},
    {DType::kUInt8, "UINT8"},
    {DType::kInt8, "INT8"},
    {DType::kInt16, "INT16"},
    {DType::kInt32, "INT32"},
    {DType::kInt64, "INT64"},
    {DType::kFloat16, "FP16"},
    {DType::kBFloat16, "BF16"},
    {DType::kFloat32, "FP32"},
    {DType::kFloat64, "FP64"},
}};

}  // namespace

std::string_view wire_name(DType dtype) {
  for (const auto& [known, name] : kWireNames) {
    if (known == dtype) {
      return name;
    }
  }
  IKBO_UNREACHABLE("DType without a wire name");
}

std::optional<DType> dtype_of_wire_name(std::string_view name) {
  for (const auto& [dtype, known] : kWireNames) {
    if (known == name) {
      return dtype;
    }
  }
  return std::nullopt;
}

}  // namespace ikbo::server
