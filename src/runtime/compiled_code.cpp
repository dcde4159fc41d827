// SPDX-License-Identifier: Apache-2.0
#include "runtime/compiled_code.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/error.h"
#include "runtime/checks.h"
#include "runtime/json_field.h"

namespace ikbo::runtime {
namespace {

// Where AOTInductor puts the code of programs, below the archive's own top folder.
constexpr std::string_view kCodeFolder = "data/aotinductor/";
// A large model calls some thousand operators by name.
constexpr std::size_t kMaxJsonBytes = std::size_t{64} << 20;

std::string folder_of(const Program& program) {
  return std::string(kCodeFolder) + program.name + "/";
}

std::optional<std::string> find_code(const Archive& archive, const std::string& folder,
                                     std::string_view suffix) {
  for (std::string& entry : archive.entries()) {
    const bool is_code = entry.find(folder) != std::string::npos;
    if (is_code && entry.ends_with(suffix)) {
      return std::move(entry);
    }
  }
  return std::nullopt;
}

// Calls `visit` with the JSON document of an entry.
template <typename Visit>
void with_json(const Archive& archive, const std::string& entry, const Visit& visit) {
  const std::vector<std::byte> bytes = archive.read(entry, kMaxJsonBytes);
  const std::string origin = archive.path() + ": " + entry;
  simdjson::dom::parser parser;
  simdjson::dom::element document;
  const simdjson::error_code error =
      parser.parse(reinterpret_cast<const char*>(bytes.data()), bytes.size()).get(document);
  IKBO_CHECK(error == simdjson::SUCCESS, origin, " is not JSON: ", simdjson::error_message(error));
  visit(JsonField(origin, "", document));
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

void check_inputs_of_code(const Archive& archive, const Manifest& manifest,
                          const std::vector<std::string>& compiled) {
  IKBO_CHECK(manifest.inputs.size() == compiled.size(), archive.path(), ": inputs must be ",
             compiled.size(), ", as many as the code was compiled for; the manifest has ",
             manifest.inputs.size(), ": package the model again");
  for (std::size_t i = 0; i < compiled.size(); ++i) {
    const TensorSpec& spec = manifest.inputs[i];
    const std::string listed = std::string(name_of(spec.dtype)) + " " + text_of(spec.shape);
    IKBO_CHECK(listed == compiled[i], archive.path(), ": input ", spec.name, " must be ",
               compiled[i], ", as the code was compiled for; the manifest says ", listed,
               ": package the model again");
  }
}

void check_metadata(const Archive& archive, const std::string& folder, const Manifest& manifest) {
  const std::optional<std::string> entry = find_code(archive, folder, ".wrapper_metadata.json");
  IKBO_CHECK(entry.has_value(), archive.path(), ": holds no ", folder,
             "*.wrapper_metadata.json, which says what its code was compiled for: package the "
             "model again");
  with_json(archive, *entry, [&](const JsonField& metadata) {
    const std::string device = metadata.at("AOTI_DEVICE_KEY").text();
    IKBO_CHECK(device == manifest.device, archive.path(), ": device must be ", device,
               ", which the code was compiled for; the manifest says ", manifest.device,
               ": package the model again");
    check_inputs_of_code(archive, manifest, lines_of(metadata.at("ikbo.inputs").text()));
  });
}

void check_listed(const Archive& archive, const Manifest& manifest, const std::string& op) {
  const auto is_op = [&](const OpSchema& listed) { return listed.name == op; };
  IKBO_CHECK(
      !op.starts_with("ikbo::") || std::any_of(manifest.ops.begin(), manifest.ops.end(), is_op),
      archive.path(), ": the code calls ", op,
      ", which ops of the manifest must list and does not: package the model again");
}

}  // namespace

void check_compiled_code(const Archive& archive, const Program& program) {
  const std::string folder = folder_of(program);
  IKBO_CHECK(find_code(archive, folder, ".so").has_value(), archive.path(),
             ": holds no compiled code (", folder, "*.so); package the model again");
  check_metadata(archive, folder, program.manifest);
  // Operators that are called by name; absent where the code calls none.
  if (const std::optional<std::string> calls = find_code(archive, folder, ".wrapper.json")) {
    with_json(archive, *calls, [&](const JsonField& document) {
      for (const JsonField& call : document.at("nodes").elements()) {
        check_listed(archive, program.manifest, call.at("node").at("target").text());
      }
    });
  }
}

}  // namespace ikbo::runtime
