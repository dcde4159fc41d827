// SPDX-License-Identifier: Apache-2.0
#include "server/served_models.h"

#include <utility>

#include "ikbo/error.h"
#include "server/request_error.h"

namespace ikbo::server {

void ServedModels::add(std::shared_ptr<const runtime::Model> model, const BatcherOptions& options) {
  const runtime::Manifest& added = model->manifest();
  for (const auto& known : models_) {
    IKBO_CHECK(known->manifest().model_name != added.model_name ||
                   known->manifest().model_version != added.model_version,
               "--model: name and version must be unique; got two packages of model ",
               added.model_name, " version ", added.model_version);
  }
  models_.push_back(std::make_unique<ServedModel>(std::move(model), options));
}

ServedModel& ServedModels::find(std::string_view name, std::string_view version) const {
  bool is_name_known = false;
  for (auto it = models_.rbegin(); it != models_.rend(); ++it) {
    const runtime::Manifest& manifest = (*it)->manifest();
    if (manifest.model_name == name) {
      is_name_known = true;
      if (version.empty() || manifest.model_version == version) {
        return **it;
      }
    }
  }
  if (is_name_known) {
    refuse(ErrorKind::kNotFound, "model ", name, " has no version '", version, "' here");
  }
  refuse(ErrorKind::kNotFound, "there is no model '", name, "' here");
}

std::vector<std::string> ServedModels::versions(std::string_view name) const {
  std::vector<std::string> versions;
  for (const auto& known : models_) {
    if (known->manifest().model_name == name) {
      versions.push_back(known->manifest().model_version);
    }
  }
  return versions;
}

std::vector<LabelledMetrics> ServedModels::metrics() const {
  std::vector<LabelledMetrics> all;
  all.reserve(models_.size());
  for (const auto& known : models_) {
    all.push_back({known->manifest().model_name, known->manifest().model_version, &known->metrics});
  }
  return all;
}

}  // namespace ikbo::server
