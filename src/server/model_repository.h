// SPDX-License-Identifier: Apache-2.0
// Which packages are served, and how that changes while the process serves.
//
//   sources (files, folders) -> packages found -> loaded, warmed up -> all versions of a name in
//                                                                      the list at once
//
// Everything happens on the background thread, one change after the other. A change that fails
// leaves what is served as it is. A model whose device failed is loaded again, at once and then
// after longer and longer times until that succeeds.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ikbo/runtime/model.h"
#include "server/background.h"
#include "server/batcher.h"
#include "server/log.h"
#include "server/package_files.h"
#include "server/request_error.h"
#include "server/served_models.h"

namespace ikbo::server {

struct RepositoryOptions {
  PackageSources sources;
  OpenPackage open;
  // Compiled code of a package; throws ikbo::Error.
  std::function<std::shared_ptr<const runtime::Model>(const runtime::Package&)> load;
  BatcherOptions batcher;
  bool allows_changes = false;  // by clients
  // Until a model whose device failed is loaded again; doubled from one failure to the next.
  std::chrono::milliseconds first_delay{100};
  std::chrono::milliseconds max_delay{30'000};
};

// What the index says of one package.
struct IndexEntry {
  std::string name;
  std::string version;
  std::string_view state;  // READY, LOADING, UNAVAILABLE
  std::string reason;
};

class ModelRepository {
 public:
  // Nothing: it succeeded. Called once, by the background thread.
  using Done = std::function<void(const std::optional<RequestError>&)>;

  // All must outlive it.
  ModelRepository(RepositoryOptions options, ServedModels& models, Background& background,
                  const Logger& logger);
  // Stops the background thread.
  ~ModelRepository();
  ModelRepository(const ModelRepository&) = delete;
  ModelRepository& operator=(const ModelRepository&) = delete;

  // Serves all packages that the sources name. Throws ikbo::Error. Before the other methods, which
  // any thread may call.
  void load_all();

  bool allows_changes() const { return options_.allows_changes; }  // by clients
  // Makes the served versions of `name` those that the sources name now: new ones and those whose
  // file changed are loaded, what is gone is no longer served.
  void load(const std::string& name, Done done);
  // No version of `name` is served from here on.
  void unload(const std::string& name, Done done);
  // Does `load` for every name of the sources that `read` returns then, and `unload` for those of
  // which they have no package. What fails is in the log.
  void reread(std::function<PackageSources()> read);

  std::vector<IndexEntry> index(bool ready_only) const;

 private:
  using Delay = std::chrono::milliseconds;
  using Key = std::pair<std::string, std::string>;  // name and version
  static constexpr std::string_view kReady = "READY";
  static constexpr std::string_view kLoading = "LOADING";
  static constexpr std::string_view kUnavailable = "UNAVAILABLE";
  struct Served {
    ServedModels::Handle model;
    std::string path;
    FileIdentity identity;
  };
  struct State {
    std::string_view state;
    std::string reason;
  };

  // Run by the background thread.
  void apply(const std::string& name, const std::vector<PackageFile>& found);
  Served load_package(const PackageFile& file);
  ServedModels::Handle start(const runtime::Package& package);
  void retire(const std::string& name);
  void recover(const Key& key, const ServedModel* failed, Delay delay);
  void publish(const std::string& name);
  void watch_device(const Key& key, Served& served, Delay delay);

  void set_state(const Key& key, std::string_view state, std::string reason = "");

  RepositoryOptions options_;
  ServedModels& models_;
  Background& background_;
  const Logger& logger_;
  std::map<std::string, std::vector<Served>> served_;  // of the background thread
  mutable std::mutex mutex_;
  std::map<Key, State> states_;  // guarded by mutex_
};

}  // namespace ikbo::server
