// SPDX-License-Identifier: Apache-2.0
#include "server/repository_codec.h"

#include <simdjson.h>

#include "server/json_writer.h"
#include "server/request_error.h"
#include "server/v2_json.h"

namespace ikbo::server {
namespace {

using simdjson::dom::element;
using simdjson::dom::object;

// Points into `parser`; an empty body is an empty object.
object parse_body(const RequestBody& body, simdjson::dom::parser& parser) {
  const std::string_view json = body.json();
  const simdjson::padded_string text(json.empty() ? std::string_view("{}") : json);
  element root;
  if (const auto error = parser.parse(text).get(root); error != simdjson::SUCCESS) {
    refuse(ErrorKind::kBadRequest, "the request's JSON (", json.size(),
           " bytes) must be well formed: ", simdjson::error_message(error));
  }
  object fields;
  if (root.get(fields) != simdjson::SUCCESS) {
    refuse(ErrorKind::kBadRequest, "the request must be a JSON object; got ", show(root));
  }
  return fields;
}

}  // namespace

bool read_ready_only(const RequestBody& body) {
  simdjson::dom::parser parser;
  element value;
  bool is_ready_only = false;
  if (parse_body(body, parser)["ready"].get(value) == simdjson::SUCCESS &&
      value.get(is_ready_only) != simdjson::SUCCESS) {
    refuse(ErrorKind::kBadRequest, "'ready' must be true or false; got ", show(value));
  }
  return is_ready_only;
}

void check_repository_parameter(std::string_view action, std::string_view parameter) {
  // Packages have no dependents.
  if (action != "unload" || parameter != "unload_dependents") {
    refuse(ErrorKind::kBadRequest, action, ": parameter '", parameter,
           "' is not supported: a model is served as its package and the server's flags say");
  }
}

void check_repository_parameters(std::string_view action, const RequestBody& body) {
  simdjson::dom::parser parser;
  object parameters;
  if (parse_body(body, parser)["parameters"].get(parameters) == simdjson::SUCCESS) {
    for (const auto& [name, value] : parameters) {
      check_repository_parameter(action, name);
    }
  }
}

std::string encode_index(const std::vector<IndexEntry>& entries) {
  std::string json;
  JsonWriter writer(json);
  writer.begin_array();
  for (const IndexEntry& entry : entries) {
    writer.begin_object();
    writer.key("name").string(entry.name);
    writer.key("version").string(entry.version);
    writer.key("state").string(entry.state);
    writer.key("reason").string(entry.reason).end_object();
  }
  writer.end_array();
  return json;
}

}  // namespace ikbo::server
