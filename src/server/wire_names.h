// SPDX-License-Identifier: Apache-2.0
// Words of the Open Inference Protocol that REST and gRPC share.
#pragma once

#include <optional>
#include <string_view>

#include "ikbo/runtime/manifest.h"

namespace ikbo::server {

inline constexpr std::string_view kServerName = "ikbo-server";
inline constexpr std::string_view kPlatform = "pytorch_aotinductor";
inline constexpr std::string_view kBinaryExtension = "binary_tensor_data";
inline constexpr std::string_view kRepositoryExtension = "model_repository";

// "FP32" for DType::kFloat32 and so on.
std::string_view wire_name(DType dtype);
std::optional<DType> dtype_of_wire_name(std::string_view name);

// "user", "candidate", "index".
std::string_view role_name(runtime::Role role);

}  // namespace ikbo::server
