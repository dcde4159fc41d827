// SPDX-License-Identifier: Apache-2.0
// The methods of the Open Inference Protocol over gRPC. Included by grpc_server.cpp alone: gRPC's
// headers are slow to compile.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "open_inference.grpc.pb.h"
#include "server/core.h"
#include "server/grpc_codec.h"

namespace ikbo::server {

// An answer of ModelInfer. gRPC takes the slices, so that they are gone once they are written: a
// grpc::ByteBuffer would keep them until the call ends.
struct GrpcReply {
  mutable std::vector<grpc::Slice> slices;
};

}  // namespace ikbo::server

template <>
class grpc::SerializationTraits<ikbo::server::GrpcReply> {
 public:
  static grpc::Status Serialize(const ikbo::server::GrpcReply& reply, grpc::ByteBuffer* bytes,
                                bool* is_owned) {
    *bytes = grpc::ByteBuffer(reply.slices.data(), reply.slices.size());
    reply.slices.clear();
    *is_owned = true;
    return grpc::Status::OK;
  }
};

namespace ikbo::server {

using InferenceService = inference::GRPCInferenceService;

// ModelInfer sees bytes, so that tensors of an answer are sent from where they lie; GrpcService
// puts its own handler in the place of this one.
using CallbackService = InferenceService::WithCallbackMethod_ServerLive<
    InferenceService::WithCallbackMethod_ServerReady<
        InferenceService::WithCallbackMethod_ModelReady<
            InferenceService::WithCallbackMethod_ServerMetadata<
                InferenceService::WithCallbackMethod_ModelMetadata<
                    InferenceService::WithRawCallbackMethod_ModelInfer<
                        InferenceService::WithCallbackMethod_RepositoryIndex<
                            InferenceService::WithCallbackMethod_RepositoryModelLoad<
                                InferenceService::WithCallbackMethod_RepositoryModelUnload<
                                    InferenceService::Service>>>>>>>>>;

// Answers a call now.
inline grpc::ServerUnaryReactor* finish(grpc::CallbackServerContext* context,
                                        const grpc::Status& status = grpc::Status::OK) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

class GrpcService final : public CallbackService {
 public:
  explicit GrpcService(Core& core);

  // Calls whose message is here and whose answer the socket has not taken.
  int num_under_way() const { return *num_under_way_; }

  grpc::ServerUnaryReactor* ServerLive(grpc::CallbackServerContext* context,
                                       const inference::ServerLiveRequest* request,
                                       inference::ServerLiveResponse* response) override;
  grpc::ServerUnaryReactor* ServerReady(grpc::CallbackServerContext* context,
                                        const inference::ServerReadyRequest* request,
                                        inference::ServerReadyResponse* response) override;
  grpc::ServerUnaryReactor* ModelReady(grpc::CallbackServerContext* context,
                                       const inference::ModelReadyRequest* request,
                                       inference::ModelReadyResponse* response) override;
  grpc::ServerUnaryReactor* ServerMetadata(grpc::CallbackServerContext* context,
                                           const inference::ServerMetadataRequest* request,
                                           inference::ServerMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelMetadata(grpc::CallbackServerContext* context,
                                          const inference::ModelMetadataRequest* request,
                                          inference::ModelMetadataResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryIndex(grpc::CallbackServerContext* context,
                                            const inference::RepositoryIndexRequest* request,
                                            inference::RepositoryIndexResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelLoad(
      grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
      inference::RepositoryModelLoadResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelUnload(
      grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
      inference::RepositoryModelUnloadResponse* response) override;

 private:
  using UnderWay = std::shared_ptr<const void>;

  // Counts a call for as long as what it returns is held.
  UnderWay count_call() const;
  // Throws RequestError unless the call's metadata let its sender ask for what needs `access`.
  void authorize(const grpc::CallbackServerContext& context, Access access) const;
  // Counts the error.
  grpc::Status status_of(const RequestError& error) const;
  grpc::ServerUnaryReactor* infer(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer& request, GrpcReply* reply);
  void submit(grpc::CallbackServerContext* context, const grpc::ByteBuffer& request,
              GrpcReply* reply, grpc::ServerUnaryReactor* reactor,
              const std::shared_ptr<RequestRecord>& record, const UnderWay& under_way);
  // `raw`: what encode_raw_answer made of the call; null for typed outputs.
  grpc::Status answer(ServedModel& model, const InferCall& call, const GrpcAnswer* raw,
                      const Batcher::Outcome& outcome, GrpcReply* reply,
                      const std::shared_ptr<RequestRecord>& record,
                      const UnderWay& under_way) const;
  std::shared_ptr<RequestRecord> begin_record(const grpc::CallbackServerContext& context) const;
  void end_record(const std::shared_ptr<RequestRecord>& record) const;

  // Calls `change`, and answers the call when that is done. Its request has `parameters`.
  template <typename Parameters>
  grpc::ServerUnaryReactor* change_repository(
      grpc::CallbackServerContext* context, std::string_view action, const Parameters& parameters,
      const std::function<void(ModelRepository&, ModelRepository::Done)>& change);

  Core& core_;
  std::shared_ptr<std::atomic<int>> num_under_way_ = std::make_shared<std::atomic<int>>(0);
};

// Refuses every method that the process does not have, by name.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  explicit UnknownMethods(Core& core) : core_(core) {}
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  Core& core_;
};

}  // namespace ikbo::server
