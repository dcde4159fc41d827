// SPDX-License-Identifier: Apache-2.0
#include "server/model_repository.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <utility>

#include "ikbo/error.h"
#include "server/package_gate.h"

namespace ikbo::server {
namespace {

using Groups = std::map<std::string, std::vector<PackageFile>>;

// By name; the order within a name stays.
Groups group_by_name(std::vector<PackageFile> found) {
  Groups groups;
  for (PackageFile& file : found) {
    const std::string name = file.package.manifest().model_name;
    groups[name].push_back(std::move(file));
  }
  return groups;
}

std::pair<std::string, std::string> key_of(const runtime::Package& package) {
  return {package.manifest().model_name, package.manifest().model_version};
}

}  // namespace

ModelRepository::ModelRepository(RepositoryOptions options, ServedModels& models,
                                 Background& background, const Logger& logger)
    : options_(std::move(options)), models_(models), background_(background), logger_(logger) {}

ModelRepository::~ModelRepository() { background_.stop(); }

void ModelRepository::load_all() {
  const Groups groups = group_by_name(find_packages(options_.sources, options_.open));
  IKBO_CHECK(!groups.empty() || options_.allows_changes,
             "--model, --model-repository: must name a package; there is none (which only "
             "--allow-repository-changes permits)");
  for (const auto& [name, found] : groups) {
    apply(name, found);
  }
}

void ModelRepository::load(const std::string& name, Done done) {
  background_.post([this, name, done = std::move(done)] {
    std::optional<RequestError> error;
    try {
      Groups groups = group_by_name(find_packages(options_.sources, options_.open));
      if (groups.contains(name)) {
        apply(name, groups[name]);
      } else {
        error.emplace(ErrorKind::kNotFound, "there is no package of model '" + name +
                                                "' in what --model and --model-repository name");
      }
    } catch (const std::exception& failure) {
      error.emplace(ErrorKind::kLoadFailed, client_text(failure));
      logger_.write(LogLevel::kError, "model_load_failed",
                    {{"model", name}, {"error", failure.what()}});
    }
    done(error);
  });
}

void ModelRepository::unload(const std::string& name, Done done) {
  background_.post([this, name, done = std::move(done)] {
    std::optional<RequestError> error;
    if (served_.contains(name)) {
      retire(name);
    } else {
      error.emplace(ErrorKind::kNotFound, "there is no model '" + name + "' here");
    }
    done(error);
  });
}

void ModelRepository::reread(std::function<PackageSources()> read) {
  background_.post([this, read = std::move(read)] {
    Groups groups;
    try {
      PackageSources sources = read();
      groups = group_by_name(find_packages(sources, options_.open));
      options_.sources = std::move(sources);
    } catch (const std::exception& failure) {
      logger_.write(LogLevel::kError, "reread_failed", {{"error", failure.what()}});
      return;
    }
    std::set<std::string> gone;
    for (const auto& [name, served] : served_) {
      if (!groups.contains(name)) {
        gone.insert(name);
      }
    }
    for (const std::string& name : gone) {
      retire(name);
    }
    for (const auto& [name, found] : groups) {
      try {
        apply(name, found);
      } catch (const std::exception& failure) {
        logger_.write(LogLevel::kError, "model_load_failed",
                      {{"model", name}, {"error", failure.what()}});
      }
    }
    logger_.write(LogLevel::kInfo, "reread", {{"models", groups.size()}});
  });
}

std::vector<IndexEntry> ModelRepository::index(bool ready_only) const {
  const std::lock_guard lock(mutex_);
  std::vector<IndexEntry> entries;
  for (const auto& [key, state] : states_) {
    if (!ready_only || state.state == kReady) {
      entries.push_back({key.first, key.second, state.state, state.reason});
    }
  }
  return entries;
}

void ModelRepository::apply(const std::string& name, const std::vector<PackageFile>& found) {
  const auto served_before = served_.find(name);
  const auto before =
      served_before != served_.end() ? served_before->second : std::vector<Served>();
  std::vector<Served> after;
  for (const PackageFile& file : found) {
    const Key key = key_of(file.package);
    const auto known = std::ranges::find_if(before, [&](const Served& served) {
      return served.model->manifest().model_version == key.second;
    });
    const bool is_served = known != before.end() && known->model->is_ready();
    if (is_served && known->path == file.path && known->identity == file.identity) {
      after.push_back(*known);
      continue;
    }
    if (!is_served) {
      set_state(key, kLoading);
    }
    try {
      after.push_back(load_package(file));
    } catch (const std::exception& failure) {
      set_state(key, is_served ? kReady : kUnavailable,
                (is_served ? "the package before it serves on: " : "") + client_text(failure));
      throw;
    }
  }
  served_[name] = std::move(after);
  publish(name);
}

ModelRepository::Served ModelRepository::load_package(const PackageFile& file) {
  Served served{start(file.package), file.path, file.identity};
  IKBO_CHECK(identify_file(file.path) == file.identity, file.path,
             ": must not change while it is loaded; write packages elsewhere and rename them");
  watch_device(key_of(file.package), served, options_.first_delay);
  return served;
}

ServedModels::Handle ModelRepository::start(const runtime::Package& package) {
  auto loaded = options_.load(package);
  const auto warm_up = std::chrono::steady_clock::now();
  auto model = models_.start(std::move(loaded), options_.batcher);
  const auto warm_up_time = std::chrono::steady_clock::now() - warm_up;
  const runtime::Manifest& manifest = package.manifest();
  logger_.write(LogLevel::kInfo, "model_loaded",
                {{"path", package.path()},
                 {"model", manifest.model_name},
                 {"version", manifest.model_version},
                 {"max_users", manifest.max_users},
                 {"max_candidates", manifest.max_candidates},
                 {"user_stage", manifest.user_stage.has_value() ? "yes" : "no"},
                 {"warm_up_us", duration_cast<std::chrono::microseconds>(warm_up_time).count()}});
  warn_of_missing_digests(package, logger_);
  return model;
}

// The list and the index say what `served_` does.
void ModelRepository::publish(const std::string& name) {
  std::vector<ServedModels::Handle> handles;
  std::set<Key> keys;
  for (const Served& served : served_[name]) {
    handles.push_back(served.model);
    keys.emplace(name, served.model->manifest().model_version);
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(states_, [&](const auto& known) {
      return known.first.first == name && !keys.contains(known.first);
    });
    for (const ServedModels::Handle& model : handles) {
      if (model->is_ready()) {
        states_[{name, model->manifest().model_version}] = {kReady, ""};
      }
    }
  }
  models_.replace(name, std::move(handles));
}

void ModelRepository::retire(const std::string& name) {
  const auto versions = models_.versions(name);
  served_.erase(name);
  models_.replace(name, {});
  for (const std::string& version : versions) {
    set_state({name, version}, kUnavailable, "unloaded");
    logger_.write(LogLevel::kInfo, "model_unloaded", {{"model", name}, {"version", version}});
  }
}

void ModelRepository::watch_device(const Key& key, Served& served, Delay delay) {
  const auto loaded = Background::Clock::now();
  const ServedModel* model = served.model.get();
  served.model->on_failure = [=, this](const std::string& text) {
    logger_.write(LogLevel::kError, "model_failed",
                  {{"model", key.first}, {"version", key.second}, {"error", text}});
    // Who has served for long starts anew.
    const bool is_fresh = Background::Clock::now() - loaded < options_.max_delay;
    const Delay wait = is_fresh ? delay : options_.first_delay;
    background_.post([=, this] { recover(key, model, wait); }, Background::Clock::now() + wait);
    set_state(key, kUnavailable, text);
    models_.notify();
  };
}

void ModelRepository::recover(const Key& key, const ServedModel* failed, Delay delay) {
  const auto versions = served_.find(key.first);
  if (versions == served_.end()) {
    return;  // unloaded meanwhile
  }
  const auto served = std::ranges::find_if(
      versions->second, [&](const Served& known) { return known.model.get() == failed; });
  if (served == versions->second.end()) {
    return;  // replaced meanwhile
  }
  const Delay next = std::min(2 * delay, options_.max_delay);
  try {
    const FileIdentity identity = identify_file(served->path);
    const auto package = options_.open(served->path);
    IKBO_CHECK(key_of(package) == key, served->path, ": must hold model ", key.first, " version ",
               key.second, "; got model ", package.manifest().model_name, " version ",
               package.manifest().model_version);
    *served = {start(package), served->path, identity};
    watch_device(key, *served, next);
    publish(key.first);
  } catch (const std::exception& failure) {
    logger_.write(LogLevel::kError, "model_load_failed",
                  {{"model", key.first}, {"version", key.second}, {"error", failure.what()}});
    set_state(key, kUnavailable, client_text(failure));
    background_.post([=, this] { recover(key, failed, next); }, Background::Clock::now() + next);
  }
}

void ModelRepository::set_state(const Key& key, std::string_view state, std::string reason) {
  const std::lock_guard lock(mutex_);
  states_[key] = {state, std::move(reason)};
}

}  // namespace ikbo::server
