// SPDX-License-Identifier: Apache-2.0
#include "server/grpc_service.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace ikbo::server {
namespace {

// The message with the memory that it takes.
std::shared_ptr<inference::ModelInferRequest> parse(const grpc::ByteBuffer& bytes,
                                                    MemoryBudget& memory) {
  if (!bytes.Valid()) {
    throw RequestError(ErrorKind::kDisconnected, "the client went before its message was here");
  }
  struct Storage {
    MemoryBudget::Lease lease;
    inference::ModelInferRequest message;
  };
  auto storage = std::make_shared<Storage>();
  // gRPC keeps the bytes, too, until the call ends.
  storage->lease = memory.take(2 * bytes.Length());
  grpc::ByteBuffer shared(bytes);  // parsing takes the buffer
  const grpc::Status status = grpc::SerializationTraits<inference::ModelInferRequest>::Deserialize(
      &shared, &storage->message);
  if (!status.ok()) {
    refuse(ErrorKind::kBadRequest, "the request (", bytes.Length(),
           " bytes) must be an inference.ModelInferRequest; it does not parse as one");
  }
  return {storage, &storage->message};
}

// Bytes that live until gRPC has written them to the socket or given them up. Then `when_gone` is
// called, unless it is empty.
grpc::Slice owned_slice(const void* data, std::size_t size, std::shared_ptr<const void> owner,
                        std::function<void()> when_gone) {
  struct Owned {
    std::shared_ptr<const void> owner;
    std::function<void()> when_gone;
  };
  auto owned = std::make_unique<Owned>(Owned{std::move(owner), std::move(when_gone)});
  return grpc::Slice(
      const_cast<void*>(data), size,
      [](void* user_data) {
        const std::unique_ptr<Owned> gone(static_cast<Owned*>(user_data));
        if (gone->when_gone) {
          gone->when_gone();
        }
      },
      owned.release());
}

// `when_gone`: of the last bytes.
std::vector<grpc::Slice> slices_of(const GrpcAnswer& answer, const runtime::Response& response,
                                   std::function<void()> when_gone) {
  std::vector<grpc::Slice> slices;
  slices.reserve(2 * answer.parts.size());
  for (const GrpcAnswer::Part& part : answer.parts) {
    const bool is_last = &part == &answer.parts.back();
    const auto when_last = [&] { return is_last ? std::move(when_gone) : nullptr; };
    const runtime::Tensor* tensor =
        part.output.has_value() ? &response.outputs[*part.output] : nullptr;
    if (tensor != nullptr && tensor->bytes > 0) {
      slices.emplace_back(part.bytes);
      slices.push_back(owned_slice(tensor->data, tensor->bytes, tensor->owner, when_last()));
    } else {
      const auto bytes = std::make_shared<const std::string>(part.bytes);
      slices.push_back(owned_slice(bytes->data(), bytes->size(), bytes, when_last()));
    }
  }
  return slices;
}

// The sooner of the call's own deadline and the request's parameter.
Batcher::Clock::time_point deadline_of(const grpc::CallbackServerContext& context,
                                       const InferCall& call) {
  constexpr std::chrono::microseconds kLongest = std::chrono::hours(24);
  const auto left = std::chrono::duration_cast<std::chrono::microseconds>(
      context.deadline() - std::chrono::system_clock::now());
  const auto timeout = std::min(left, call.timeout.value_or(kLongest));
  return timeout < kLongest ? Batcher::Clock::now() + timeout : Batcher::Clock::time_point::max();
}

std::string_view view(const grpc::string_ref& text) { return {text.data(), text.size()}; }

// The values of a header that may come several times.
std::string joined(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                   const char* key) {
  std::string text;
  const auto [first, last] = metadata.equal_range(key);
  for (auto field = first; field != last; ++field) {
    text.append(text.empty() ? "" : ",").append(view(field->second));
  }
  return text;
}

}  // namespace

void GrpcService::authorize(const grpc::CallbackServerContext& context, Access access) const {
  const auto& metadata = context.client_metadata();
  const auto field = metadata.find("authorization");
  core_.access.check(access, field == metadata.end()
                                 ? std::string_view()
                                 : std::string_view(field->second.data(), field->second.size()));
}

grpc::Status GrpcService::status_of(const RequestError& error) const {
  core_.metrics.count(error.kind());
  return {static_cast<grpc::StatusCode>(info_of(error.kind()).grpc_status), error.what()};
}

grpc::ServerUnaryReactor* GrpcService::ServerLive(grpc::CallbackServerContext* context,
                                                  const inference::ServerLiveRequest*,
                                                  inference::ServerLiveResponse* response) {
  response->set_live(true);
  return finish(context);
}

grpc::ServerUnaryReactor* GrpcService::ServerReady(grpc::CallbackServerContext* context,
                                                   const inference::ServerReadyRequest*,
                                                   inference::ServerReadyResponse* response) {
  response->set_ready(core_.is_ready());
  return finish(context);
}

grpc::ServerUnaryReactor* GrpcService::ModelReady(grpc::CallbackServerContext* context,
                                                  const inference::ModelReadyRequest* request,
                                                  inference::ModelReadyResponse* response) {
  try {
    const auto model = core_.models.find(request->name(), request->version());
    response->set_ready(!core_.is_stopping && model->is_ready());
  } catch (const RequestError&) {
    response->set_ready(false);
  }
  return finish(context);
}

grpc::ServerUnaryReactor* GrpcService::ServerMetadata(grpc::CallbackServerContext* context,
                                                      const inference::ServerMetadataRequest*,
                                                      inference::ServerMetadataResponse* response) {
  try {
    authorize(*context, Access::kInfer);
    *response = grpc_server_metadata(IKBO_VERSION, core_.extensions());
    return finish(context);
  } catch (const RequestError& error) {
    return finish(context, status_of(error));
  }
}

grpc::ServerUnaryReactor* GrpcService::ModelMetadata(grpc::CallbackServerContext* context,
                                                     const inference::ModelMetadataRequest* request,
                                                     inference::ModelMetadataResponse* response) {
  try {
    authorize(*context, Access::kInfer);
    const auto model = core_.models.find(request->name(), request->version());
    *response = grpc_model_metadata(model->manifest(), core_.models.versions(request->name()));
    return finish(context);
  } catch (const RequestError& error) {
    return finish(context, status_of(error));
  }
}

std::shared_ptr<RequestRecord> GrpcService::begin_record(
    const grpc::CallbackServerContext& context) const {
  auto record = std::make_shared<RequestRecord>();
  record->protocol = "grpc";
  record->read = record->begin;  // gRPC had read it all by then
  if (core_.observer.has_value()) {
    const auto& metadata = context.client_metadata();
    const auto parent = metadata.find("traceparent");
    const bool has_parent = metadata.count("traceparent") == 1;  // two of them are none
    core_.observer->begin(*record, has_parent ? view(parent->second) : "",
                          joined(metadata, "tracestate"));
  }
  return record;
}

void GrpcService::end_record(const std::shared_ptr<RequestRecord>& record) const {
  if (core_.observer.has_value()) {
    core_.observer->end(record);
  }
}

GrpcService::GrpcService(Core& core) : core_(core) {
  // In the place of generated code's handler, of which the reply would be a grpc::ByteBuffer.
  using Handler = grpc::internal::CallbackUnaryHandler<grpc::ByteBuffer, GrpcReply>;
  const auto& service = *inference::ModelInferRequest::descriptor()->file()->service(0);
  MarkMethodRawCallback(
      service.FindMethodByName("ModelInfer")->index(),
      new Handler([this](grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                         GrpcReply* reply) { return infer(context, *request, reply); }));
}

GrpcService::UnderWay GrpcService::count_call() const {
  ++*num_under_way_;
  return {num_under_way_.get(), [count = num_under_way_](const void*) { --*count; }};
}

grpc::ServerUnaryReactor* GrpcService::infer(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer& request, GrpcReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto refuse_with = [&](const RequestError& error, const auto& record) {
    end_record(record);
    reactor->Finish(status_of(error));
  };
  const std::shared_ptr<RequestRecord> record = begin_record(*context);
  try {
    submit(context, request, reply, reactor, record, count_call());
  } catch (const RequestError& error) {
    refuse_with(error, record);
  } catch (const std::bad_alloc&) {
    refuse_with(out_of_memory(), record);
  }
  return reactor;
}

void GrpcService::submit(grpc::CallbackServerContext* context, const grpc::ByteBuffer& request,
                         GrpcReply* reply, grpc::ServerUnaryReactor* reactor,
                         const std::shared_ptr<RequestRecord>& record, const UnderWay& under_way) {
  authorize(*context, Access::kInfer);
  auto message = parse(request, core_.request_memory);
  const auto model = core_.models.find(message->model_name(), message->model_version());
  record->model = model->manifest().model_name;
  record->version = model->manifest().model_version;
  try {
    auto call = std::make_shared<InferCall>(decode_infer(model->manifest(), std::move(message)));
    std::shared_ptr<const GrpcAnswer> raw;
    if (!call->outputs.empty() && call->outputs.front().is_binary) {
      raw = std::make_shared<GrpcAnswer>(encode_raw_answer(model->manifest(), *call));
    }
    note_call(*call, *record);
    runtime::Request inputs = std::move(call->request);
    model->submit(std::move(inputs),
                  // Once the call has finished the server may end: until then all is let go of but
                  // what is the request's own.
                  [=, this, used = model](Batcher::Outcome outcome) mutable {
                    const grpc::Status status =
                        answer(*used, *call, raw.get(), outcome, reply, record, under_way);
                    outcome = runtime::Response();
                    used.reset();
                    end_record(record);
                    reactor->Finish(status);
                  },
                  {.deadline = deadline_of(*context, *call),
                   .is_abandoned = [context] { return context->IsCancelled(); },
                   .memory = &core_.request_memory,
                   .record = record});
  } catch (const RequestError& error) {
    model->metrics.finish(*record, info_of(error.kind()).status);
    throw;
  }
}

grpc::Status GrpcService::answer(ServedModel& model, const InferCall& call, const GrpcAnswer* raw,
                                 const Batcher::Outcome& outcome, GrpcReply* reply,
                                 const std::shared_ptr<RequestRecord>& record,
                                 const UnderWay& under_way) const {
  const auto refuse_with = [&](const RequestError& error) {
    model.metrics.finish(*record, info_of(error.kind()).status);
    return status_of(error);
  };
  if (const auto* error = std::get_if<RequestError>(&outcome)) {
    return refuse_with(*error);
  }
  try {
    const auto& result = std::get<runtime::Response>(outcome);
    const auto observe = [metrics = model.shared_metrics, record, under_way] {
      metrics->observe_overhead(*record);
    };
    reply->slices = raw != nullptr ? slices_of(*raw, result, observe)
                                   : slices_of(encode_typed_answer(model.manifest(), call, result),
                                               result, observe);
  } catch (const std::bad_alloc&) {
    return refuse_with(out_of_memory());
  }
  model.metrics.finish(*record, 200);
  return grpc::Status::OK;
}

grpc::ServerGenericBidiReactor* UnknownMethods::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  class Refusal final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Refusal(const std::string& method) {
      Finish({grpc::StatusCode::UNIMPLEMENTED, "there is no method " + method + " here"});
    }
    void OnDone() override { delete this; }
  };
  core_.metrics.count(ErrorKind::kNotFound);
  return new Refusal(context->method());
}

}  // namespace ikbo::server
