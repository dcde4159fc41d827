// SPDX-License-Identifier: Apache-2.0
#include "server/grpc_server.h"

#include <absl/synchronization/mutex.h>
#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <limits>
#include <string_view>
#include <thread>

#include "ikbo/error.h"
#include "server/grpc_listener.h"
#include "server/grpc_service.h"

namespace ikbo::server {
namespace {

constexpr std::size_t kMinQuotaBytes = std::size_t{64} << 20;

// What gRPC has to say goes into the log of the process. Its log function takes no context.
std::atomic<const Logger*> grpc_logger = nullptr;

void log_for_grpc(gpr_log_func_args* args) {
  if (const Logger* logger = grpc_logger) {
    logger->write(LogLevel::kWarning, "grpc", {{"message", std::string_view(args->message)}});
  }
}

std::shared_ptr<grpc::ServerCredentials> make_credentials(const TlsOptions& tls) {
  if (!tls.is_enabled()) {
    return grpc::InsecureServerCredentials();
  }
  const TlsFiles files = read_tls_files(tls);
  grpc::SslServerCredentialsOptions options(
      files.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                              : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = files.client_ca;
  options.pem_key_cert_pairs.push_back({files.key, files.certificate});
  return grpc::SslServerCredentials(options);
}

int milliseconds(std::chrono::milliseconds time) {
  return static_cast<int>(std::min<std::int64_t>(time.count(), std::numeric_limits<int>::max()));
}

}  // namespace

class GrpcServer::Impl {
 public:
  Impl(const GrpcOptions& options, const TlsOptions& tls, Core& core, const Logger& logger)
      : core_(core),
        listener_(options.host, options.port, options.max_connections, core.metrics, logger),
        service_(core),
        unknown_(core) {
    // Distributions build Abseil with its search for lock cycles, which takes a stack trace in
    // every lock of gRPC.
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    grpc_logger = &logger;
    gpr_set_log_function(log_for_grpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    using Builder = grpc::ServerBuilder::experimental_type;
    connections_ = builder.experimental().AddExternalConnectionAcceptor(
        Builder::ExternalConnectionType::FROM_FD, make_credentials(tls));
    builder.RegisterService(&service_);
    builder.RegisterCallbackGenericService(&unknown_);
    configure(options, builder);
    // For what arrives before a call's memory is counted; gRPC's own buffers need some, too.
    grpc::ResourceQuota quota("ikbo-server");
    builder.SetResourceQuota(quota.Resize(std::max(core.request_memory.limit(), kMinQuotaBytes)));
    server_ = builder.BuildAndStart();
    IKBO_CHECK(server_ != nullptr, "--grpc-port: gRPC must start; its log has why it does not");
    listener_.start([this](int listener, int socket) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = listener;
      connection.fd = socket;
      connections_->HandleNewConnection(&connection);
    });
    core.models.watch([this] { show_health(); });
    show_health();
  }

  ~Impl() {
    core_.models.watch({});
    stop(std::chrono::milliseconds(0));
    stopper_.join();
    canceller_.join();
    grpc_logger = nullptr;
  }

  std::uint16_t port() const { return listener_.port(); }

  void stop(std::chrono::milliseconds timeout) {
    if (stopper_.joinable()) {
      return;
    }
    listener_.stop();
    deadline_ = std::chrono::system_clock::now() + timeout;
    server_->GetHealthCheckService()->SetServingStatus(false);
    std::packaged_task<void()> shut_down([this] { server_->Shutdown(deadline_); });
    stopped_ = shut_down.get_future();
    stopper_ = std::thread(std::move(shut_down));
    canceller_ = std::thread([this] { cancel_idle_calls(); });
  }

  // Shutdown itself waits for calls that cannot be cancelled, such as one whose model runs.
  bool wait_stopped() { return stopped_.wait_until(deadline_) == std::future_status::ready; }

 private:
  void show_health() {
    grpc::HealthCheckServiceInterface& health = *server_->GetHealthCheckService();
    const bool is_ready = core_.is_ready();
    health.SetServingStatus("", is_ready);
    health.SetServingStatus(InferenceService::service_full_name(), is_ready);
  }

  // Streams that clients hold open for good, and calls whose message has not come by then, would
  // keep the shutdown waiting for all of its time.
  void cancel_idle_calls() {
    constexpr std::chrono::milliseconds kForMessages{2000};
    constexpr std::chrono::milliseconds kStep{20};
    const auto begin = std::chrono::system_clock::now();
    while (stopped_.wait_for(kStep) != std::future_status::ready) {
      const auto now = std::chrono::system_clock::now();
      if (now >= begin + kForMessages && service_.num_under_way() == 0) {
        grpc_server_cancel_all_calls(server_->c_server());
        return;
      }
    }
  }

  static void configure(const GrpcOptions& options, grpc::ServerBuilder& builder) {
    constexpr std::size_t kMax = std::numeric_limits<int>::max();
    builder.SetMaxReceiveMessageSize(static_cast<int>(std::min(options.max_message_bytes, kMax)));
    builder.SetMaxSendMessageSize(-1);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, milliseconds(options.idle_timeout));
    builder.AddChannelArgument(
        GRPC_ARG_MAX_CONNECTION_AGE_MS,
        milliseconds(options.idle_timeout * options.max_age_in_idle_timeouts));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                               milliseconds(options.drain_timeout));
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                               milliseconds(options.handshake_timeout));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, milliseconds(options.idle_timeout));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                               milliseconds(options.handshake_timeout));
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);    // no limit
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);  // of answers
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                               static_cast<int>(std::min(options.max_calls, kMax)));
    // Only reflection is served by threads that wait.
    builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
    builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
  }

  Core& core_;
  GrpcListener listener_;
  GrpcService service_;
  UnknownMethods unknown_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> connections_;
  std::unique_ptr<grpc::Server> server_;
  std::chrono::system_clock::time_point deadline_;
  std::shared_future<void> stopped_;
  std::thread stopper_;
  std::thread canceller_;
};

GrpcServer::GrpcServer(const GrpcOptions& options, const TlsOptions& tls, Core& core,
                       const Logger& logger)
    : impl_(std::make_unique<Impl>(options, tls, core, logger)) {}
GrpcServer::~GrpcServer() = default;
std::uint16_t GrpcServer::port() const { return impl_->port(); }
void GrpcServer::stop(std::chrono::milliseconds timeout) { impl_->stop(timeout); }
bool GrpcServer::wait_stopped() { return impl_->wait_stopped(); }

}  // namespace ikbo::server
