// SPDX-License-Identifier: Apache-2.0
// The calls of gRPC about the repository.
#include <optional>
#include <string>

#include "server/grpc_service.h"
#include "server/repository_codec.h"

namespace ikbo::server {

grpc::ServerUnaryReactor* GrpcService::RepositoryIndex(
    grpc::CallbackServerContext* context, const inference::RepositoryIndexRequest* request,
    inference::RepositoryIndexResponse* response) {
  try {
    authorize(*context, Access::kAdmin);
    for (const IndexEntry& entry : core_.changeable_repository().index(request->ready())) {
      auto& model = *response->add_models();
      model.set_name(entry.name);
      model.set_version(entry.version);
      model.set_state(std::string(entry.state));
      model.set_reason(entry.reason);
    }
    return finish(context);
  } catch (const RequestError& error) {
    return finish(context, status_of(error));
  }
}

template <typename Parameters>
grpc::ServerUnaryReactor* GrpcService::change_repository(
    grpc::CallbackServerContext* context, std::string_view action, const Parameters& parameters,
    const std::function<void(ModelRepository&, ModelRepository::Done)>& change) {
  try {
    authorize(*context, Access::kAdmin);
    ModelRepository& repository = core_.changeable_repository();
    for (const auto& [name, value] : parameters) {
      check_repository_parameter(action, name);
    }
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    change(repository,
           [this, reactor, under_way = count_call()](const std::optional<RequestError>& error) {
             reactor->Finish(error.has_value() ? status_of(*error) : grpc::Status::OK);
           });
    return reactor;
  } catch (const RequestError& error) {
    return finish(context, status_of(error));
  }
}

grpc::ServerUnaryReactor* GrpcService::RepositoryModelLoad(
    grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
    inference::RepositoryModelLoadResponse*) {
  return change_repository(context, "load", request->parameters(),
                           [&](ModelRepository& repository, ModelRepository::Done done) {
                             repository.load(request->model_name(), std::move(done));
                           });
}

grpc::ServerUnaryReactor* GrpcService::RepositoryModelUnload(
    grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
    inference::RepositoryModelUnloadResponse*) {
  return change_repository(context, "unload", request->parameters(),
                           [&](ModelRepository& repository, ModelRepository::Done done) {
                             repository.unload(request->model_name(), std::move(done));
                           });
}

}  // namespace ikbo::server
