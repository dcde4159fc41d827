// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ikbo {

// What an operator may apply to its sum before rounding it. kGelu is the form with erf.
enum class Activation : std::int8_t { kNone, kRelu, kGelu, kSilu, kSigmoid };

}  // namespace ikbo
