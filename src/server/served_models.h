// SPDX-License-Identifier: Apache-2.0
// The models of this process by name and version.
//
// A model is shared by the list and by every request that it answers: one that is taken out of the
// list finishes what it has, and ends, on the background thread, with the last of these requests.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/model.h"
#include "server/background.h"
#include "server/batcher.h"
#include "server/metrics.h"

namespace ikbo::server {

struct ServedModel {
  // `counts` are those of the package before it with this name and version, or new.
  ServedModel(std::shared_ptr<const runtime::Model> loaded, const BatcherOptions& options,
              std::shared_ptr<ModelMetrics> counts)
      : model(std::move(loaded)),
        shared_metrics(std::move(counts)),
        metrics(*shared_metrics),
        batcher(model, options, metrics) {}

  const runtime::Manifest& manifest() const { return model->manifest(); }
  bool is_ready() const { return !has_failed; }

  // Batcher::submit; throws RequestError(kModelUnavailable) when a run has failed in such a way
  // that the model must be loaded again. `done` must keep the model alive.
  void submit(runtime::Request request, Batcher::Done done, RequestTerms terms);

  std::shared_ptr<const runtime::Model> model;
  std::shared_ptr<ModelMetrics> shared_metrics;
  ModelMetrics& metrics;
  std::function<void(const std::string&)> on_failure;  // of the device; at most once, any thread
  std::atomic<bool> has_failed = false;
  Batcher batcher;  // last: its workers use the rest

 private:
  void fail(const std::string& text);
};

class ServedModels {
 public:
  using Handle = std::shared_ptr<ServedModel>;

  explicit ServedModels(Background& background) : background_(background) {}

  // A model that is ready to serve, not in the list yet; it counts on with the metrics of the one
  // in the list with its name and version. Throws ikbo::Error when its first run fails.
  Handle start(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options) const;
  // The versions of `name`, all at once; the last one answers requests without a version.
  void replace(std::string_view name, std::vector<Handle> versions);

  // An empty version means the last one. Throws RequestError(kNotFound).
  Handle find(std::string_view name, std::string_view version) const;
  std::vector<std::string> versions(std::string_view name) const;
  std::vector<LabelledMetrics> metrics() const;
  // None of them waits to be loaded again.
  bool are_ready() const;

  // `on_change` is called, by any thread, after are_ready may have changed; empty: not any more.
  void watch(std::function<void()> on_change);
  void notify() const;

 private:
  Background& background_;
  mutable std::mutex mutex_;
  std::vector<Handle> models_;  // guarded by mutex_
  mutable std::mutex watch_mutex_;
  std::function<void()> on_change_;  // guarded by watch_mutex_
};

}  // namespace ikbo::server
