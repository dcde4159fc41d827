// SPDX-License-Identifier: Apache-2.0
// What the server and a model say of themselves over gRPC.
#include "server/grpc_codec.h"
#include "server/wire_names.h"

namespace ikbo::server {
namespace {

using runtime::Manifest;
using runtime::TensorSpec;

void write_specs(const std::vector<TensorSpec>& specs, const std::string& kind, auto& described,
                 auto& properties) {
  for (const TensorSpec& spec : specs) {
    auto& tensor = *described.Add();
    tensor.set_name(spec.name);
    tensor.set_datatype(std::string(wire_name(spec.dtype)));
    tensor.mutable_shape()->Add(spec.shape.begin(), spec.shape.end());
    properties[kind + "." + spec.name + ".role"] = std::string(role_name(spec.role));
  }
}

}  // namespace

inference::ServerMetadataResponse grpc_server_metadata(
    const std::string& version, const std::vector<std::string_view>& extensions) {
  inference::ServerMetadataResponse metadata;
  metadata.set_name(std::string(kServerName));
  metadata.set_version(version);
  for (const std::string_view extension : extensions) {
    metadata.add_extensions(std::string(extension));
  }
  return metadata;
}

inference::ModelMetadataResponse grpc_model_metadata(const Manifest& manifest,
                                                     const std::vector<std::string>& versions) {
  inference::ModelMetadataResponse metadata;
  metadata.set_name(manifest.model_name);
  metadata.mutable_versions()->Add(versions.begin(), versions.end());
  metadata.set_platform(std::string(kPlatform));
  auto& properties = *metadata.mutable_properties();
  write_specs(manifest.inputs, "input", *metadata.mutable_inputs(), properties);
  write_specs(manifest.outputs, "output", *metadata.mutable_outputs(), properties);
  properties["max_users"] = std::to_string(manifest.max_users);
  properties["max_candidates"] = std::to_string(manifest.max_candidates);
  return metadata;
}

}  // namespace ikbo::server
