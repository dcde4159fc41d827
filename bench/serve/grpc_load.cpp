// SPDX-License-Identifier: Apache-2.0
#include <grpcpp/channel.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>
#include <sys/prctl.h>

#include <condition_variable>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

#include "load.h"
#include "open_inference.pb.h"

namespace ikbo::load {
namespace {

constexpr const char* kMethod = "/inference.GRPCInferenceService/ModelInfer";

std::shared_ptr<grpc::Channel> connect(const LoadOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetMaxReceiveMessageSize(-1);
  auto channel = grpc::CreateCustomChannel(options.host + ":" + std::to_string(options.port),
                                           grpc::InsecureChannelCredentials(), arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + options.timeout)) {
    throw std::runtime_error("--host, --port: the server must accept connections; got none in " +
                             std::to_string(options.timeout.count()) + " ms");
  }
  return channel;
}

// Counts the calls under way.
class Outstanding {
 public:
  void add() {
    const std::lock_guard lock(mutex_);
    ++count_;
  }
  void remove() {
    const std::lock_guard lock(mutex_);
    --count_;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

struct Call {
  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  Clock::time_point due;
  Clock::time_point sent;
};

// The raw outputs of an answer, one after the other.
std::string outputs_of(grpc::ByteBuffer& answer) {
  inference::ModelInferResponse message;
  std::string outputs;
  if (grpc::SerializationTraits<inference::ModelInferResponse>::Deserialize(&answer, &message)
          .ok()) {
    for (const std::string& raw : message.raw_output_contents()) {
      outputs += raw;
    }
  }
  return outputs;
}

}  // namespace

void run_grpc(const LoadOptions& options, const std::vector<LoadRequest>& requests,
              Schedule& schedule, LoadRecord& record) {
  std::vector<grpc::ByteBuffer> bodies;
  for (const LoadRequest& request : requests) {
    const grpc::Slice slice(request.body);
    bodies.emplace_back(&slice, 1);
  }
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs;
  stubs.reserve(static_cast<std::size_t>(options.connections));
  for (int i = 0; i < options.connections; ++i) {
    stubs.push_back(std::make_unique<grpc::GenericStub>(connect(options)));
  }
  prctl(PR_SET_TIMERSLACK, 1UL);  // sleeps end on time
  Outstanding outstanding;
  schedule.begin();
  for (std::size_t number = 0; number < schedule.size(); ++number) {
    std::this_thread::sleep_until(schedule.due(number));
    const LoadRequest& request = requests[number % requests.size()];
    auto call = std::make_shared<Call>();
    call->due = schedule.due(number);
    call->sent = Clock::now();
    call->context.set_deadline(std::chrono::system_clock::now() + options.timeout);
    outstanding.add();
    stubs[number % stubs.size()]->UnaryCall(
        &call->context, kMethod, grpc::StubOptions(), &bodies[number % bodies.size()],
        &call->answer, [call, &request, &record, &outstanding](const grpc::Status& status) mutable {
          const Clock::time_point done = Clock::now();
          if (status.ok()) {
            const std::string outputs =
                request.expected.has_value() ? outputs_of(call->answer) : std::string();
            record.answered(request, call->due, call->sent, done,
                            std::as_bytes(std::span(outputs)));
          } else {
            record.failed(call->due, "grpc_" + std::to_string(status.error_code()));
          }
          // A context has its channel: the last of these must not end on a thread of gRPC's.
          call.reset();
          outstanding.remove();
        });
  }
  outstanding.wait();
}

}  // namespace ikbo::load
