// SPDX-License-Identifier: Apache-2.0
// Tensor elements between JSON arrays and typed memory.
#pragma once

#include <simdjson.h>

#include <string_view>

#include "ikbo/runtime/tensor.h"
#include "server/json_writer.h"

namespace ikbo::server {

// Writes the elements of `data` (flat row-major, or nested as `shape` says) to `out`, which has
// room for all of `shape`. Throws RequestError(kBadRequest) that starts with `where` when the
// count, the nesting, an element's type or its value does not fit.
void read_json_tensor(simdjson::dom::array data, DType dtype, const runtime::Shape& shape,
                      std::string_view where, void* out);

// Appends the elements as one flat array. Throws RequestError(kBadRequest) that starts with `where`
// for a value that JSON does not have (infinity, NaN).
void write_json_tensor(const runtime::Tensor& tensor, std::string_view where, JsonWriter& writer);

}  // namespace ikbo::server
