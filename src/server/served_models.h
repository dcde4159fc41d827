// SPDX-License-Identifier: Apache-2.0
// The models of this process by name and version.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/model.h"
#include "server/batcher.h"
#include "server/metrics.h"

namespace ikbo::server {

struct ServedModel {
  ServedModel(std::shared_ptr<const runtime::Model> loaded, const BatcherOptions& options)
      : model(std::move(loaded)),
        metrics(SpecCosts::of_spec(model->manifest().spec_json)),
        batcher(model, options, metrics) {}

  const runtime::Manifest& manifest() const { return model->manifest(); }

  std::shared_ptr<const runtime::Model> model;
  ModelMetrics metrics;
  Batcher batcher;
};

class ServedModels {
 public:
  // Throws ikbo::Error when a model of this name and version is here already.
  void add(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options);

  // An empty version means the one added last. Throws RequestError(kNotFound).
  ServedModel& find(std::string_view name, std::string_view version) const;
  std::vector<std::string> versions(std::string_view name) const;
  std::vector<LabelledMetrics> metrics() const;

 private:
  std::vector<std::unique_ptr<ServedModel>> models_;
};

}  // namespace ikbo::server
