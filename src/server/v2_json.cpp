// SPDX-License-Identifier: Apache-2.0
#include "server/v2_json.h"

#include "server/infer_call.h"

namespace ikbo::server {

using simdjson::dom::element;

std::string show(element value) {
  constexpr std::size_t kMaxLength = 40;
  if (value.is_array()) {
    return "an array";
  }
  if (value.is_object()) {
    return "an object";
  }
  std::string text = simdjson::minify(value);
  if (text.size() > kMaxLength) {
    text = text.substr(0, kMaxLength) + "...";
  }
  return text;
}

NamedTensor read_named_tensor(const runtime::Manifest& manifest, element value,
                              std::string_view kind,
                              const std::vector<runtime::TensorSpec>& specs) {
  NamedTensor tensor;
  if (value.get(tensor.fields) != simdjson::SUCCESS) {
    bad_request(manifest, "each ", kind, " must be an object; got ", show(value));
  }
  std::string_view name;
  if (tensor.fields["name"].get(name) != simdjson::SUCCESS) {
    bad_request(manifest, "each ", kind, " must have a string 'name'");
  }
  tensor.where.append(kind).append(" ").append(name);
  tensor.index = find_tensor(manifest, kind, name, specs);
  for (const std::string_view parameter : kRefusedParameters) {
    element got;
    if (tensor.fields["parameters"][parameter].get(got) == simdjson::SUCCESS) {
      bad_request(manifest, tensor.where, ": parameter '", parameter, "' is not supported; got ",
                  show(got));
    }
  }
  return tensor;
}

}  // namespace ikbo::server
