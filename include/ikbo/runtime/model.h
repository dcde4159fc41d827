// SPDX-License-Identifier: Apache-2.0
// From a .pt2 file to a run.
//
//   Package  opened archive, manifest checked              immutable
//   Model    one loaded package, safe to share by threads  immutable
//   Session  one thread's way to run a Model
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ikbo/runtime/manifest.h"
#include "ikbo/runtime/tensor.h"

namespace ikbo::runtime {

class Executor;

// An opened package. Opening reads the archive's directory and the manifest only: no model code
// runs. Throws ikbo::Error that names the file and what is wrong with it.
class Package {
 public:
  static Package open(const std::string& path);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // Bytes of one archive entry; throws when it is absent or larger than `max_bytes`.
  std::vector<std::byte> read(const std::string& entry, std::size_t max_bytes) const;

 private:
  std::string path_;
  Manifest manifest_;
};

struct ModelOptions {
  std::string ops_library;    // path of libikbo_ops.so; needed when the package calls ikbo operators
  int num_sessions = 1;       // runs that may be under way at once
  int threads_per_run = 0;    // intra-op threads; 0: leave the process's setting
};

class Model {
 public:
  // Loads the operator library (once per process), checks that every operator schema of the manifest
  // is the one registered, and loads the compiled code. Throws ikbo::Error.
  static std::shared_ptr<const Model> load(const Package& package, const ModelOptions& options);
  // A model around any executor: how tests and sanitizer builds run without compiled code.
  static std::shared_ptr<const Model> with_executor(Manifest manifest,
                                                    std::shared_ptr<Executor> executor);

  const Manifest& manifest() const { return manifest_; }

 private:
  friend class Session;
  Model(Manifest manifest, std::shared_ptr<Executor> executor);
  Manifest manifest_;
  std::shared_ptr<Executor> executor_;
};

// Inputs of one run, in the manifest's input order, the index included.
struct RunInputs {
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  std::vector<TensorView> tensors;
};

class Session {
 public:
  explicit Session(std::shared_ptr<const Model> model);
  // Checks dtypes, shapes, ranges and index values, then runs. Throws ikbo::Error that names the
  // input, the requirement and the value; the session stays usable. Not thread-safe: one per thread.
  std::vector<Tensor> run(const RunInputs& inputs);

 private:
  std::shared_ptr<const Model> model_;
};

}  // namespace ikbo::runtime
