// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "server/json_tensor.h"
#include "server/json_writer.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

using runtime::TensorSpec;

void write_shape(const runtime::Shape& shape, JsonWriter& writer) {
  writer.begin_array();
  for (const std::int64_t extent : shape) {
    writer.number(extent);
  }
  writer.end_array();
}

void write_specs(const std::vector<TensorSpec>& specs, JsonWriter& writer) {
  writer.begin_array();
  for (const TensorSpec& spec : specs) {
    writer.begin_object();
    writer.key("name").string(spec.name);
    writer.key("datatype").string(wire_name(spec.dtype));
    writer.key("shape");
    write_shape(spec.shape, writer);
    writer.key("parameters").begin_object();
    writer.key("role").string(role_name(spec.role)).end_object();
    writer.end_object();
  }
  writer.end_array();
}

void write_output(const TensorSpec& spec, const runtime::Tensor& tensor, bool is_binary,
                  std::string_view model, JsonWriter& writer) {
  writer.begin_object();
  writer.key("name").string(spec.name);
  writer.key("datatype").string(wire_name(spec.dtype));
  writer.key("shape");
  write_shape(tensor.shape, writer);
  if (is_binary) {
    writer.key("parameters").begin_object();
    writer.key("binary_data_size").number(tensor.bytes).end_object();
  } else {
    writer.key("data");
    write_json_tensor(tensor, "model " + std::string(model) + ": output " + spec.name, writer);
  }
  writer.end_object();
}

}  // namespace

InferAnswer encode_infer(const runtime::Manifest& manifest, const InferCall& call,
                         const runtime::Response& response) {
  InferAnswer answer;
  JsonWriter writer(answer.json);
  writer.begin_object();
  writer.key("model_name").string(manifest.model_name);
  writer.key("model_version").string(manifest.model_version);
  if (!call.id.empty()) {
    writer.key("id").string(call.id);
  }
  writer.key("outputs").begin_array();
  for (const WantedOutput& wanted : call.outputs) {
    const runtime::Tensor& tensor = response.outputs[wanted.index];
    write_output(manifest.outputs[wanted.index], tensor, wanted.is_binary, manifest.model_name,
                 writer);
    if (wanted.is_binary) {
      answer.blobs.push_back(tensor);
      answer.has_binary = true;
    }
  }
  writer.end_array().end_object();
  return answer;
}

std::string encode_server_metadata(std::string_view version,
                                   const std::vector<std::string_view>& extensions) {
  std::string json;
  JsonWriter writer(json);
  writer.begin_object();
  writer.key("name").string(kServerName);
  writer.key("version").string(version);
  writer.key("extensions").begin_array();
  for (const std::string_view extension : extensions) {
    writer.string(extension);
  }
  writer.end_array().end_object();
  return json;
}

std::string encode_model_metadata(const runtime::Manifest& manifest,
                                  const std::vector<std::string>& versions) {
  std::string json;
  JsonWriter writer(json);
  writer.begin_object();
  writer.key("name").string(manifest.model_name);
  writer.key("versions").begin_array();
  for (const std::string& version : versions) {
    writer.string(version);
  }
  writer.end_array();
  writer.key("platform").string(kPlatform);
  writer.key("inputs");
  write_specs(manifest.inputs, writer);
  writer.key("outputs");
  write_specs(manifest.outputs, writer);
  writer.key("parameters").begin_object();
  writer.key("max_users").number(manifest.max_users);
  writer.key("max_candidates").number(manifest.max_candidates).end_object();
  writer.end_object();
  return json;
}

std::string encode_model_ready(const runtime::Manifest& manifest, bool ready) {
  std::string json;
  JsonWriter writer(json);
  writer.begin_object();
  writer.key("name").string(manifest.model_name);
  writer.key("ready").boolean(ready).end_object();
  return json;
}

std::string encode_flag(std::string_view name, bool value) {
  std::string json;
  JsonWriter(json).begin_object().key(name).boolean(value).end_object();
  return json;
}

std::string encode_error(std::string_view text) {
  std::string json;
  JsonWriter(json).begin_object().key("error").string(text).end_object();
  return json;
}

}  // namespace ikbo::server
