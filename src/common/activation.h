// SPDX-License-Identifier: Apache-2.0
// The names of the activations.
#pragma once

#include <optional>
#include <string_view>

#include "ikbo/activation.h"

namespace ikbo {

inline constexpr std::string_view kActivationNames = "none, relu, gelu, silu, sigmoid";

inline constexpr std::optional<Activation> parse_activation(std::string_view name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "sigmoid") return Activation::kSigmoid;
  return std::nullopt;
}

}  // namespace ikbo
