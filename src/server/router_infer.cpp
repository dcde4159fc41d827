// SPDX-License-Identifier: Apache-2.0
// Infer requests over HTTP, from their bodies to their replies.
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <variant>

#include "server/router.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

// Whether a worker may as well send the answer itself: about 50 us for the largest that it does, of
// eight at most, so that its next run begins soon.
bool is_quick(const InferCall& call, const Batcher::Outcome& outcome, const RequestRecord& record) {
  constexpr std::size_t kMaxRequests = 8;
  constexpr std::size_t kMaxBytes = std::size_t{128} << 10;
  constexpr std::size_t kBytesPerJsonByte = 64;  // a number is written as text in tens of ns
  const auto* response = std::get_if<runtime::Response>(&outcome);
  if (response == nullptr) {
    return true;
  }
  std::size_t bytes = 0;
  for (const WantedOutput& wanted : call.outputs) {
    bytes += response->outputs[wanted.index].bytes * (wanted.is_binary ? 1 : kBytesPerJsonByte);
  }
  return bytes <= kMaxBytes && record.run.requests <= kMaxRequests;
}

}  // namespace

void Router::infer(const ServedModels::Handle& model, HttpRequest& request, const Finish& finish) {
  const std::shared_ptr<RequestRecord>& record = request.record;
  record->model = model->manifest().model_name;
  record->version = model->manifest().model_version;
  try {
    MemoryBudget::Lease decoding =
        core_.request_memory.take(decoding_bytes(request.body->json().size()));
    auto call =
        std::make_shared<InferCall>(decode_infer(model->manifest(), std::move(request.body)));
    decoding = {};
    note_call(*call, *record);
    runtime::Request inputs = std::move(call->request);
    RequestTerms terms{.memory = &core_.request_memory, .record = record};
    if (call->timeout.has_value()) {
      terms.deadline = Batcher::Clock::now() + *call->timeout;
    }
    model->submit(
        std::move(inputs),
        // All but the way back goes with the reply: a worker may let go of this later than the
        // server ends.
        [this, model = model, call, finish,
         record = request.record](Batcher::Outcome outcome) mutable {
          const bool quick = is_quick(*call, outcome, *record);
          finish({[this, model = std::move(model), call = std::move(call),
                   record = std::move(record), outcome = std::move(outcome)] {
                    return infer_reply(*model, *call, outcome, record);
                  },
                  quick});
        },
        std::move(terms));
  } catch (const RequestError& error) {
    model->metrics.finish(*record, info_of(error.kind()).status);
    throw;
  }
}

HttpReply Router::infer_reply(ServedModel& model, const InferCall& call,
                              const Batcher::Outcome& outcome,
                              const std::shared_ptr<RequestRecord>& record) const {
  HttpReply reply;
  try {
    if (const auto* error = std::get_if<RequestError>(&outcome)) {
      throw *error;
    }
    InferAnswer answer = encode_infer(model.manifest(), call, std::get<runtime::Response>(outcome));
    if (answer.has_binary) {
      reply.content_type = "application/octet-stream";
      reply.headers.emplace_back("Inference-Header-Content-Length",
                                 std::to_string(answer.json.size()));
    }
    reply.text = std::move(answer.json);
    reply.blobs = std::move(answer.blobs);
    reply.on_sent = [metrics = model.shared_metrics, record] {
      metrics->observe_overhead(*record);
    };
  } catch (const RequestError& error) {
    reply = error_reply(error);
  } catch (const std::bad_alloc&) {
    reply = error_reply(out_of_memory());
  }
  model.metrics.finish(*record, reply.status);
  return reply;
}

}  // namespace ikbo::server
