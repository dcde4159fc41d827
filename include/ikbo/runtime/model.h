// SPDX-License-Identifier: Apache-2.0
// From a .pt2 file to a run. Tensors are in host memory, whatever device the package is for.
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

#include "ikbo/error.h"
#include "ikbo/runtime/cuda_graphs.h"
#include "ikbo/runtime/manifest.h"
#include "ikbo/runtime/tensor.h"
#include "ikbo/runtime/user_cache.h"

namespace ikbo::runtime {

class Archive;
class Executor;

// A run failed because of the device, not of its inputs: no run of this model will succeed until
// it is loaded again.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// What a package must show to be opened.
struct PackageTrust {
  bool require_digests = false;  // refuse packages whose manifest lists no digests
  // PEM files of Ed25519 public keys; one of them must have signed the package. Empty: any package.
  std::vector<std::string> keys;
};

// Throws ikbo::Error, which names the file, for one of `trust.keys` that is no such key.
void check_trusted_keys(const PackageTrust& trust);

// An opened package. Copies share the opened archive; all methods may be called by several threads.
class Package {
 public:
  // Reads the whole archive and checks it: no model code runs. The file stays open, and what was
  // checked is what Model::load loads, whatever is put in its place. Throws ikbo::Error that names
  // the file and what is wrong with it.
  static Package open(const std::string& path, const PackageTrust& trust = {});
  // The same for an archive that is open already (one in memory, say).
  static Package from_archive(std::shared_ptr<const Archive> archive,
                              const PackageTrust& trust = {});

  const std::string& path() const;
  const Manifest& manifest() const { return manifest_; }
  const Archive& archive() const { return *archive_; }
  // Bytes of an entry beside the manifest ("replay/0/x_user.bin"); throws ikbo::Error when it is
  // absent, damaged or larger than `max_bytes`.
  std::vector<std::byte> read(const std::string& entry, std::size_t max_bytes) const;

 private:
  Package(std::shared_ptr<const Archive> archive, std::string folder, Manifest manifest);

  std::shared_ptr<const Archive> archive_;
  std::string folder_;  // of the manifest, with its closing slash
  Manifest manifest_;
};

// Most sessions of a model, and most threads of a run: each holds memory, and a number beyond is a
// mistake.
inline constexpr int kMaxThreads = 1024;

struct ModelOptions {
  std::string ops_library;  // path of libikbo_ops.so; needed when the package calls ikbo operators
  int num_sessions = 1;     // runs that may be under way at once
  int threads_per_run =
      0;  // intra-op threads, a setting of the whole process; 0: leave it as it is
  // Inputs of which callers give one row for each user, though the package, compiled without users,
  // wants one for each candidate: the rows are repeated before each run. Such a model has the input
  // cand_to_user as well. It is what a package made by ikbo.transform is compared with.
  std::vector<std::string> replicated_inputs;
  // Where a package with a user stage keeps the states of its users; null: nowhere.
  std::shared_ptr<UserStateCache> user_cache = nullptr;
  GraphOptions graphs;
};

// Throws ikbo::Error where Model::load would for these options, without loading the package's code.
void check_model_options(const Package& package, const ModelOptions& options);

class Model {
 public:
  // Loads the operator library (once per process), checks that every operator schema of the
  // manifest is the one registered, and loads the compiled code; a package for CUDA onto the first
  // GPU that the process sees. Throws ikbo::Error.
  static std::shared_ptr<const Model> load(const Package& package, const ModelOptions& options);
  // A model around any executor: how tests run without compiled code.
  static std::shared_ptr<const Model> with_executor(Manifest manifest,
                                                    std::shared_ptr<Executor> executor);

  const Manifest& manifest() const { return manifest_; }
  // Of the states that it keeps of users; null: it keeps none.
  std::shared_ptr<const UserCacheCounts> user_cache_counts() const;

 private:
  friend class Session;
  Model(Manifest manifest, std::shared_ptr<Executor> executor);
  Manifest manifest_;
  std::shared_ptr<Executor> executor_;
};

// Inputs of one run, in the manifest's input order, the index included.
struct RunInputs {
  std::int64_t num_users = 0;  // 0 when the package has no user tensors
  std::int64_t num_candidates = 0;
  std::vector<TensorView> tensors;
  // For the cache of user states: who each user is, in the caller's words; shorter than num_users:
  // nobody says of the others.
  std::vector<std::string> user_keys = {};
  bool bypasses_user_cache = false;  // neither reads nor fills it
};

class Session {
 public:
  // Where ModelOptions::graphs asks for CUDA graphs it makes them, which takes a second or so.
  explicit Session(std::shared_ptr<const Model> model);
  // Checks dtypes, shapes, byte counts, ranges and index values, then runs. Inputs may have any
  // alignment (those off their element's are copied) and are not read after the return. Outputs are
  // in the manifest's order and own their storage. Without candidates nothing is computed for them:
  // their outputs have 0 rows. Throws ikbo::Error that names the input, the requirement and the
  // value; the session stays usable, but after a DeviceError. Not thread-safe: one session per
  // thread.
  std::vector<Tensor> run(const RunInputs& inputs);

 private:
  std::shared_ptr<const Model> model_;
  std::shared_ptr<Executor> executor_;
};

}  // namespace ikbo::runtime
