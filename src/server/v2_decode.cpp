// SPDX-License-Identifier: Apache-2.0
#include <simdjson.h>

#include <string>
#include <string_view>
#include <utility>

#include "server/input_reader.h"
#include "server/request_error.h"
#include "server/v2_codec.h"
#include "server/v2_json.h"

namespace ikbo::server {
namespace {

using runtime::Manifest;
using simdjson::dom::array;
using simdjson::dom::element;
using simdjson::dom::object;

constexpr std::string_view kHowBinary = "ask for it with \"binary_data\": true";

static_assert(RequestBody::kPadding >= simdjson::SIMDJSON_PADDING);

// The elements point into `parser`.
object parse_object(const Manifest& manifest, std::string_view json,
                    simdjson::dom::parser& parser) {
  element root;
  const auto error = parser.parse(json.data(), json.size(), false).get(root);
  if (error != simdjson::SUCCESS) {
    bad_request(manifest, "the request's JSON (", json.size(),
                " bytes) must be well formed: ", simdjson::error_message(error));
  }
  object fields;
  if (root.get(fields) != simdjson::SUCCESS) {
    bad_request(manifest, "the request must be a JSON object; got ", show(root));
  }
  return fields;
}

std::string read_id(const Manifest& manifest, object root) {
  element id;
  std::string_view text;
  if (root["id"].get(id) == simdjson::SUCCESS && id.get(text) != simdjson::SUCCESS) {
    bad_request(manifest, "'id' must be a string; got ", show(id));
  }
  return std::string(text);
}

std::string_view find_user_key(const Manifest& manifest, object root) {
  element value;
  std::string_view key;
  if (root["parameters"]["user_key"].get(value) == simdjson::SUCCESS &&
      value.get(key) != simdjson::SUCCESS) {
    bad_request(manifest, "parameter 'user_key' must be a string; got ", show(value));
  }
  return key;
}

std::optional<std::chrono::microseconds> find_timeout(const Manifest& manifest, object root) {
  element value;
  std::int64_t microseconds = 0;
  if (root["parameters"]["timeout"].get(value) == simdjson::SUCCESS &&
      value.get(microseconds) != simdjson::SUCCESS) {
    bad_request(manifest, "parameter 'timeout' must be a number of microseconds from 0 on; got ",
                show(value));
  }
  return read_timeout(manifest, microseconds);
}

// The array `name` of `root`; false when there is none.
bool find_array(const Manifest& manifest, object root, const char* name, array& items) {
  element value;
  if (root[name].get(value) != simdjson::SUCCESS) {
    return false;
  }
  if (value.get(items) != simdjson::SUCCESS) {
    bad_request(manifest, "'", name, "' must be an array; got ", show(value));
  }
  return true;
}

bool read_flag(const Manifest& manifest, object fields, const char* name, bool otherwise) {
  element value;
  bool flag = otherwise;
  if (fields["parameters"][name].get(value) == simdjson::SUCCESS &&
      value.get(flag) != simdjson::SUCCESS) {
    bad_request(manifest, "parameter '", name, "' must be true or false; got ", show(value));
  }
  return flag;
}

std::vector<WantedOutput> read_outputs(const Manifest& manifest, object root) {
  std::vector<WantedOutput> wanted;
  const bool are_binary = read_flag(manifest, root, "binary_data_output", false);
  array outputs;
  if (find_array(manifest, root, "outputs", outputs)) {
    for (const element value : outputs) {
      const NamedTensor output = read_named_tensor(manifest, value, "output", manifest.outputs);
      add_output(manifest, output.index,
                 read_flag(manifest, output.fields, "binary_data", are_binary), kHowBinary, wanted);
    }
  }
  if (wanted.empty()) {
    for (std::size_t i = 0; i < manifest.outputs.size(); ++i) {
      add_output(manifest, i, are_binary, kHowBinary, wanted);
    }
  }
  return wanted;
}

}  // namespace

InferCall decode_infer(const Manifest& manifest, std::shared_ptr<const RequestBody> body) {
  simdjson::dom::parser parser;
  const object root = parse_object(manifest, body->json(), parser);
  InferCall call;
  call.id = read_id(manifest, root);
  call.timeout = find_timeout(manifest, root);
  call.outputs = read_outputs(manifest, root);
  array inputs;
  if (!find_array(manifest, root, "inputs", inputs)) {
    bad_request(manifest, "the request must have an array 'inputs'; there is none");
  }
  InputReader reader(manifest, std::move(body));
  for (const element input : inputs) {
    reader.read(input);
  }
  call.request = reader.finish();
  set_user_key(manifest, find_user_key(manifest, root), call.request);
  return call;
}

}  // namespace ikbo::server
