// SPDX-License-Identifier: Apache-2.0
#include "server/served_models.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "server/request_error.h"

namespace ikbo::server {

void ServedModel::submit(runtime::Request request, Batcher::Done done, RequestTerms terms) {
  if (has_failed) {
    refuse(ErrorKind::kModelUnavailable, "model ", manifest().model_name,
           " must be ready; its last run failed on the device, and it is being loaded again");
  }
  batcher.submit(
      std::move(request),
      [this, done = std::move(done)](Batcher::Outcome outcome) {
        if (const auto* error = std::get_if<RequestError>(&outcome);
            error != nullptr && error->kind() == ErrorKind::kModelUnavailable) {
          fail(error->what());
        }
        done(std::move(outcome));
      },
      std::move(terms));
}

void ServedModel::fail(const std::string& text) {
  if (!has_failed.exchange(true) && on_failure) {
    on_failure(text);
  }
}

ServedModels::Handle ServedModels::start(std::shared_ptr<const runtime::Model> model,
                                         const BatcherOptions& options) const {
  const runtime::Manifest& manifest = model->manifest();
  std::shared_ptr<ModelMetrics> counts;
  {
    const std::lock_guard lock(mutex_);
    for (const Handle& known : models_) {
      if (known->manifest().model_name == manifest.model_name &&
          known->manifest().model_version == manifest.model_version) {
        counts = known->shared_metrics;
      }
    }
  }
  if (counts == nullptr) {
    counts = std::make_shared<ModelMetrics>();
  }
  auto started = std::make_unique<ServedModel>(std::move(model), options, std::move(counts));
  // The last to let go may be one of the model's own workers, which cannot wait for itself.
  return {started.release(), [&background = background_](ServedModel* ended) {
            background.post([ended] { delete ended; });
          }};
}

void ServedModels::replace(std::string_view name, std::vector<Handle> versions) {
  {
    const std::lock_guard lock(mutex_);
    const auto is_replaced = [&](const Handle& known) {
      return known->manifest().model_name == name;
    };
    const auto last =
        std::stable_partition(models_.begin(), models_.end(), std::not_fn(is_replaced));
    std::vector<Handle> kept(std::make_move_iterator(models_.begin()),
                             std::make_move_iterator(last));
    kept.insert(kept.end(), versions.begin(), versions.end());
    models_.swap(kept);
  }
  notify();
}

ServedModels::Handle ServedModels::find(std::string_view name, std::string_view version) const {
  bool is_name_known = false;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = models_.rbegin(); it != models_.rend(); ++it) {
      const runtime::Manifest& manifest = (*it)->manifest();
      if (manifest.model_name == name) {
        is_name_known = true;
        if (version.empty() || manifest.model_version == version) {
          return *it;
        }
      }
    }
  }
  if (is_name_known) {
    refuse(ErrorKind::kNotFound, "model ", name, " has no version '", version, "' here");
  }
  refuse(ErrorKind::kNotFound, "there is no model '", name, "' here");
}

std::vector<std::string> ServedModels::versions(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> versions;
  for (const Handle& known : models_) {
    if (known->manifest().model_name == name) {
      versions.push_back(known->manifest().model_version);
    }
  }
  return versions;
}

std::vector<LabelledMetrics> ServedModels::metrics() const {
  const std::lock_guard lock(mutex_);
  std::vector<LabelledMetrics> all;
  all.reserve(models_.size());
  for (const Handle& known : models_) {
    all.push_back({known->manifest().model_name, known->manifest().model_version,
                   known->shared_metrics.get(), known->shared_metrics,
                   known->model->user_cache_counts()});
  }
  return all;
}

bool ServedModels::are_ready() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(models_, [](const Handle& known) { return known->is_ready(); });
}

void ServedModels::watch(std::function<void()> on_change) {
  const std::lock_guard lock(watch_mutex_);
  on_change_ = std::move(on_change);
}

void ServedModels::notify() const {
  const std::lock_guard lock(watch_mutex_);
  if (on_change_) {
    on_change_();
  }
}

}  // namespace ikbo::server
