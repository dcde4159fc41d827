// SPDX-License-Identifier: Apache-2.0
// What reading inputs and outputs of a request have in common. Private to the codec.
#pragma once

#include <simdjson.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/manifest.h"
#include "server/request_error.h"

namespace ikbo::server {

template <typename... Parts>
[[noreturn]] void bad_request(const runtime::Manifest& manifest, const Parts&... parts) {
  refuse(ErrorKind::kBadRequest, "model ", manifest.model_name, ": ", parts...);
}

// A JSON value as an error message shows it: short, whatever the client sent.
std::string show(simdjson::dom::element value);

// "[-1, 64]"
std::string show_shape(const runtime::Shape& shape);

// An element of "inputs" or "outputs" and the tensor of the manifest that it names.
struct NamedTensor {
  simdjson::dom::object fields;
  std::size_t index = 0;  // into the list of specs
  std::string where;      // "input x_user"
};

// `kind` is "input" or "output". Parameters whose meaning this server does not know how to honour
// (shared memory, classification) are refused.
NamedTensor read_named_tensor(const runtime::Manifest& manifest, simdjson::dom::element value,
                              std::string_view kind, const std::vector<runtime::TensorSpec>& specs);

}  // namespace ikbo::server
