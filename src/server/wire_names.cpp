// SPDX-License-Identifier: Apache-2.0
#include "server/wire_names.h"

#include <array>
#include <utility>

#include "ikbo/error.h"

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

std::string_view role_name(runtime::Role role) {
  switch (role) {
    case runtime::Role::kUser:
      return "user";
    case runtime::Role::kCandidate:
      return "candidate";
    case runtime::Role::kIndex:
      return "index";
  }
  IKBO_UNREACHABLE("Role");
}

}  // namespace ikbo::server
