// SPDX-License-Identifier: Apache-2.0
// What reading inputs and outputs of a request have in common. Private to the codec.
#pragma once

#include <simdjson.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/manifest.h"

namespace ikbo::server {

// A JSON value as an error message shows it: short, whatever the client sent.
std::string show(simdjson::dom::element value);

// An element of "inputs" or "outputs" and the tensor of the manifest that it names.
struct NamedTensor {
  simdjson::dom::object fields;
  std::size_t index = 0;  // into the list of specs
  std::string where;      // "input x_user"
};

// `kind` is "input" or "output". kRefusedParameters are refused.
NamedTensor read_named_tensor(const runtime::Manifest& manifest, simdjson::dom::element value,
                              std::string_view kind, const std::vector<runtime::TensorSpec>& specs);

}  // namespace ikbo::server
