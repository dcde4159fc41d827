// SPDX-License-Identifier: Apache-2.0
#include "ikbo/runtime/manifest.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <limits>
#include <set>

#include "runtime/json_field.h"

namespace ikbo::runtime {
namespace {

constexpr int kOneProgram = 1;  // format versions
constexpr int kTwoStages = 2;
// Row numbers of users are int32, and so is the number of rows that an index has.
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int64_t>::max();

constexpr std::array kDTypes = {DType::kBool,    DType::kUInt8,  DType::kInt8,    DType::kInt16,
                                DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBFloat16,
                                DType::kFloat32, DType::kFloat64};

bool is_integer(DType dtype) {
  return dtype == DType::kUInt8 || dtype == DType::kInt8 || dtype == DType::kInt16 ||
         dtype == DType::kInt32 || dtype == DType::kInt64;
}

DType parse_dtype(const JsonField& field) {
  const std::string name = field.text();
  std::string names;
  for (const DType dtype : kDTypes) {
    if (name == name_of(dtype)) {
      return dtype;
    }
    names += (names.empty() ? "" : ", ") + std::string(name_of(dtype));
  }
  field.require(false, "one of " + names);
  IKBO_UNREACHABLE("parse_dtype");
}

Role parse_role(const JsonField& field) {
  const std::string name = field.text();
  field.require(name == "user" || name == "candidate" || name == "index",
                "one of user, candidate, index");
  return name == "user" ? Role::kUser : name == "candidate" ? Role::kCandidate : Role::kIndex;
}

// Checks also that the bytes of the largest batch can be counted.
Shape parse_shape(const JsonField& field, DType dtype, std::int64_t max_rows) {
  const std::vector<JsonField> extents = field.elements();
  field.require(!extents.empty(), "a shape whose first extent is the batch (-1)");
  extents[0].integer(-1, -1);
  Shape shape = {-1};
  auto bytes = static_cast<std::ptrdiff_t>(size_of(dtype));
  bool countable = !__builtin_mul_overflow(bytes, max_rows, &bytes);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    shape.push_back(extents[i].integer(0, kMaxExtent));
    countable = countable && !__builtin_mul_overflow(bytes, shape.back(), &bytes);
  }
  field.require(countable, "small enough for " + std::to_string(max_rows) +
                               " rows to have fewer than 2^63 bytes");
  return shape;
}

std::optional<ValueRange> parse_values(const JsonField& tensor, const TensorSpec& spec) {
  const std::optional<JsonField> field = tensor.find("values");
  if (!field.has_value()) {
    return std::nullopt;
  }
  field->require(is_integer(spec.dtype) && spec.role != Role::kIndex,
                 "absent: the tensor is an index or has no integer dtype");
  const std::int64_t min = field->at("min").integer(-kMaxExtent, kMaxExtent);
  return ValueRange{min, field->at("max").integer(min, kMaxExtent)};
}

TensorSpec parse_tensor(const JsonField& field, const Manifest& manifest) {
  TensorSpec spec;
  spec.name = field.at("name").text();
  spec.dtype = parse_dtype(field.at("dtype"));
  spec.role = parse_role(field.at("role"));
  field.at("role").require(spec.role == Role::kCandidate || manifest.has_users(),
                           "candidate, since max_users is 0");
  spec.shape = parse_shape(field.at("shape"), spec.dtype,
                           num_rows(spec.role, manifest.max_users, manifest.max_candidates));
  if (spec.role == Role::kIndex) {
    field.at("dtype").require(spec.dtype == DType::kInt32, "int32, since the role is index");
    field.at("shape").require(spec.shape.size() == 1, "[-1], since the role is index");
  }
  spec.values = parse_values(field, spec);
  return spec;
}

std::vector<TensorSpec> parse_tensors(const JsonField& field, const Manifest& manifest) {
  std::vector<TensorSpec> specs;
  std::set<std::string> names;
  for (const JsonField& element : field.elements()) {
    specs.push_back(parse_tensor(element, manifest));
    element.at("name").require(names.insert(specs.back().name).second, "unique");
  }
  field.require(!specs.empty(), "an array with at least one tensor");
  return specs;
}

std::size_t count_role(const std::vector<TensorSpec>& specs, Role role) {
  std::size_t count = 0;
  for (const TensorSpec& spec : specs) {
    count += spec.role == role ? 1 : 0;
  }
  return count;
}

// What inputs and outputs must be together.
void check_roles(const JsonField& document, const Manifest& manifest) {
  const std::size_t users = count_role(manifest.inputs, Role::kUser);
  const std::size_t indices = count_role(manifest.inputs, Role::kIndex);
  document.at("inputs").require(
      (users > 0) == manifest.has_users(),
      manifest.has_users() ? "an array with a tensor of role user, since max_users is not 0"
                           : "an array without tensors of role user, since max_users is 0");
  document.at("inputs").require(
      indices == (manifest.has_users() ? 1 : 0),
      manifest.has_users() ? "an array with one tensor of role index, since max_users is not 0"
                           : "an array without an index, since max_users is 0");
  document.at("outputs").require(count_role(manifest.outputs, Role::kIndex) == 0,
                                 "an array without an index");
}

// What the user stage gives the candidate stage; after inputs and outputs.
UserStage parse_user_stage(const JsonField& field, const Manifest& manifest) {
  UserStage stage;
  stage.state = parse_tensors(field.at("state"), manifest);
  for (const JsonField& tensor : field.at("state").elements()) {
    tensor.at("role").require(tensor.at("role").text() == "user", "user");
  }
  std::ptrdiff_t bytes = 0;
  for (const TensorSpec& tensor : stage.state) {
    field.at("state").require(!__builtin_add_overflow(bytes, tensor.row_bytes(), &bytes),
                              "small enough for one user's rows to have fewer than 2^63 bytes");
  }
  stage.passed = field.at("passed").texts();
  const std::set<std::string> names(stage.passed.begin(), stage.passed.end());
  field.at("passed").require(names.size() == stage.passed.size(), "an array of different names");
  for (const JsonField& name : field.at("passed").elements()) {
    const bool is_user_input =
        std::any_of(manifest.inputs.begin(), manifest.inputs.end(), [&](const TensorSpec& input) {
          return input.role == Role::kUser && input.name == name.text();
        });
    name.require(is_user_input, "the name of an input of role user");
  }
  return stage;
}

std::vector<OpSchema> parse_ops(const JsonField& field) {
  std::vector<OpSchema> ops;
  std::set<std::string> names;
  for (const JsonField& element : field.elements()) {
    const JsonField name = element.at("name");
    ops.push_back({name.text(), element.at("schema").text()});
    name.require(ops.back().name.starts_with("ikbo::"), "the name of an ikbo operator");
    name.require(names.insert(ops.back().name).second, "unique");
  }
  return ops;
}

ReplayCase parse_replay_case(const JsonField& field, const Manifest& manifest) {
  ReplayCase replay;
  replay.id = field.at("id").text();
  replay.num_users =
      field.at("num_users").integer(manifest.has_users() ? 1 : 0, manifest.max_users);
  replay.num_candidates = field.at("num_candidates").integer(0, manifest.max_candidates);
  replay.inputs = field.at("inputs").texts();
  field.at("inputs").require(replay.inputs.size() == manifest.inputs.size(),
                             "an array with one entry per input");
  replay.outputs = field.at("outputs").texts();
  field.at("outputs").require(replay.outputs.size() == manifest.outputs.size(),
                              "an array with one entry per output");
  replay.atol = field.at("atol").tolerance();
  replay.rtol = field.at("rtol").tolerance();
  for (const JsonField& kernel : field.at("kernels").elements()) {
    replay.kernels.push_back({kernel.at("op").text(), kernel.at("kernel").text()});
  }
  return replay;
}

std::vector<ReplayCase> parse_replay(const JsonField& field, const Manifest& manifest) {
  std::vector<ReplayCase> cases;
  std::set<std::string> ids;
  for (const JsonField& element : field.elements()) {
    cases.push_back(parse_replay_case(element, manifest));
    element.at("id").require(ids.insert(cases.back().id).second, "unique");
  }
  return cases;
}

std::vector<FileDigest> parse_files(const JsonField& field) {
  constexpr std::size_t kDigits = 64;
  std::vector<FileDigest> files;
  std::set<std::string> names;
  for (const JsonField& element : field.elements()) {
    const JsonField digest = element.at("sha256");
    files.push_back({element.at("name").text(), digest.text()});
    element.at("name").require(names.insert(files.back().name).second, "unique");
    digest.require(
        files.back().sha256.size() == kDigits &&
            files.back().sha256.find_first_not_of("0123456789abcdef") == std::string::npos,
        "64 hexadecimal digits in lower case");
  }
  field.require(!files.empty(), "an array with at least one file");
  return files;
}

// The device and, of a GPU, the one architecture that the code was compiled for.
void parse_device(const JsonField& document, Manifest& manifest) {
  const JsonField device = document.at("device");
  manifest.device = device.text();
  device.require(manifest.device == "cpu" || manifest.device == "cuda", "cpu or cuda");
  if (manifest.device == "cuda") {
    constexpr int kMaxCapability = 999;
    manifest.compute_capability =
        static_cast<int>(document.at("compute_capability").integer(10, kMaxCapability));
  } else if (const std::optional<JsonField> field = document.find("compute_capability")) {
    field->require(false, "absent, since device is cpu");
  }
}

// What names a model in a server's paths: clients take the segments "." and ".." out of a path.
std::string parse_name(const JsonField& field) {
  std::string name = field.text();
  const bool is_plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  });
  field.require(is_plain && name != "." && name != "..",
                "letters, digits, '.', '_' or '-', but not '.' or '..'");
  return name;
}

Manifest parse_document(const JsonField& document) {
  const std::int64_t format = document.at("format_version").integer(kOneProgram, kTwoStages);
  Manifest manifest;
  manifest.model_name = parse_name(document.at("model").at("name"));
  manifest.model_version = parse_name(document.at("model").at("version"));
  manifest.torch_version = document.at("torch_version").text();
  parse_device(document, manifest);
  manifest.max_users = document.at("max_users").integer(0, kMaxRows);
  manifest.max_candidates = document.at("max_candidates").integer(1, kMaxRows);
  manifest.inputs = parse_tensors(document.at("inputs"), manifest);
  manifest.outputs = parse_tensors(document.at("outputs"), manifest);
  check_roles(document, manifest);
  if (format == kTwoStages) {
    manifest.user_stage = parse_user_stage(document.at("user_stage"), manifest);
  }
  manifest.ops = parse_ops(document.at("ops"));
  manifest.replay = parse_replay(document.at("replay"), manifest);
  if (const std::optional<JsonField> files = document.find("files")) {
    manifest.files = parse_files(*files);
  }
  if (const std::optional<JsonField> spec = document.find("spec")) {
    manifest.spec_json = spec->minified();
  }
  return manifest;
}

}  // namespace

std::size_t TensorSpec::row_bytes() const {
  std::size_t bytes = size_of(dtype);
  for (std::size_t i = 1; i < shape.size(); ++i) {
    bytes *= static_cast<std::size_t>(shape[i]);
  }
  return bytes;
}

std::int64_t num_rows(Role role, std::int64_t num_users, std::int64_t num_candidates) {
  return role == Role::kUser ? num_users : num_candidates;
}

Manifest parse_manifest(std::string_view json, std::string_view origin) {
  simdjson::dom::parser parser;
  simdjson::dom::element document;
  const simdjson::error_code error = parser.parse(json.data(), json.size()).get(document);
  IKBO_CHECK(error == simdjson::SUCCESS, origin, " is not JSON: ", simdjson::error_message(error));
  return parse_document(JsonField(origin, "", document));
}

}  // namespace ikbo::runtime
