// SPDX-License-Identifier: Apache-2.0
// What a package says of itself: the parsed form of the JSON document `ikbo/manifest.json` that
// `ikbo.package` writes into the .pt2 archive.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/tensor.h"

namespace ikbo::runtime {

// Which batch a tensor's first dimension is.
enum class Role : std::int8_t {
  kUser,       // [U, ...], one row per user
  kCandidate,  // [B, ...], one row per candidate
  kIndex,      // cand_to_user, int32 [B]
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;  // shape[0] == -1 (the batch), every other extent is fixed
  Role role = Role::kCandidate;
};

// One operator whose kernel is chosen by the batch sizes: rows of the compilation spec.
struct OpSchema {
  std::string name;    // "ikbo::target_attention"
  std::string schema;  // the text that the dispatcher must hold under that name
};

struct ReplayCase {
  std::string id;
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  std::vector<std::string> inputs;   // archive entries, raw little-endian bytes, in input order
  std::vector<std::string> outputs;  // likewise, in output order
  double atol = 0;
  double rtol = 0;
};

struct Manifest {
  int format_version = 0;
  std::string model_name;
  std::string model_version;
  std::string torch_version;
  std::string device;  // "cpu" or "cuda"
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::int64_t max_users = 0;  // 0: the package has no user inputs
  std::int64_t max_candidates = 0;
  std::vector<OpSchema> ops;  // the ikbo operators that the package calls
  std::vector<ReplayCase> replay;
  std::string spec_json;  // the compilation spec, verbatim

  bool has_users() const { return max_users > 0; }
};

// Parses and checks the JSON text. Throws ikbo::Error naming the field, what it must be and what it
// is.
Manifest parse_manifest(std::string_view json);

}  // namespace ikbo::runtime
