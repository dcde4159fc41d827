// SPDX-License-Identifier: Apache-2.0
// What a package says of itself: the parsed form of the JSON document `extra/ikbo/manifest.json`
// that `ikbo.package` writes into the .pt2 archive.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
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

// The values that elements of an integer tensor may have, both ends included.
struct ValueRange {
  std::int64_t min = 0;
  std::int64_t max = 0;
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  Shape shape;  // shape[0] == -1 (the batch), every other extent is fixed
  Role role = Role::kCandidate;
  // Of integer inputs that compiled code uses as row numbers of a table, which it does unchecked.
  std::optional<ValueRange> values;

  // Bytes of one row. parse_manifest has checked that the largest batch of such rows is countable.
  std::size_t row_bytes() const;
};

// An operator that the package calls.
struct OpSchema {
  std::string name;    // "ikbo::target_attention", with ".overload" where it has one
  std::string schema;  // the text that the dispatcher must hold under that name
};

// A kernel launch that a replay case must make.
struct KernelRun {
  std::string op;      // without its namespace: "target_attention"
  std::string kernel;  // as the operator's kernel choice prints itself

  friend auto operator<=>(const KernelRun&, const KernelRun&) = default;
};

// Stored inputs and the outputs that the unmodified program gave for them. Entry names are relative
// to the manifest's folder; their bytes are raw, row-major, little endian.
struct ReplayCase {
  std::string id;
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  std::vector<std::string> inputs;   // in input order
  std::vector<std::string> outputs;  // in output order
  double atol = 0;
  double rtol = 0;
  std::vector<KernelRun> kernels;
};

// An entry of the archive by its whole name, and what its bytes hash to.
struct FileDigest {
  std::string name;
  std::string sha256;  // 64 hexadecimal digits in lower case
};

// How a package in two stages hands over from the first, which runs at the users' rows, to the
// second, whose inputs are those of the package but for user inputs not listed here, then `state`.
struct UserStage {
  std::vector<TensorSpec> state;    // what the user stage returns, of role kUser
  std::vector<std::string> passed;  // user inputs that the candidate stage reads as well
};

struct Manifest {
  std::string model_name;
  std::string model_version;
  std::string torch_version;
  std::string device;          // "cpu" or "cuda"
  int compute_capability = 0;  // of the GPU that the code was compiled for, 90 for 9.0; 0: none
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  std::int64_t max_users = 0;  // 0: the package has no user tensors
  std::int64_t max_candidates = 0;
  std::optional<UserStage> user_stage;  // none: the package is one program
  std::vector<OpSchema> ops;            // the ikbo operators that the package calls
  std::vector<ReplayCase> replay;
  std::vector<FileDigest> files;  // all entries but the manifest and its signature; empty: unknown
  std::string spec_json;  // the compilation spec, as minified JSON; empty when there is none

  bool has_users() const { return max_users > 0; }
};

// Rows of a tensor of that role in a run of those sizes.
std::int64_t num_rows(Role role, std::int64_t num_users, std::int64_t num_candidates);

// Parses and checks the JSON text. Throws ikbo::Error naming `origin` (a file, say), the field,
// what it must be and what it is. Fields that the format version does not know are ignored.
Manifest parse_manifest(std::string_view json, std::string_view origin);

}  // namespace ikbo::runtime
