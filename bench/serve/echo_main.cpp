// SPDX-License-Identifier: Apache-2.0
// ikbo-echo: the least that a server of ikbo-server's stack can do. It reads a request whole, works
// for a fixed time and answers with bytes of a fixed size: what a client sees of it beyond that
// time is Beast, gRPC, the kernel and the client itself.
#include <absl/synchronization/mutex.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/byte_buffer.h>

#include <CLI/CLI.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/vector_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "open_inference.grpc.pb.h"

namespace ikbo::load {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using ErrorCode = boost::system::error_code;
using Response = http::response<http::vector_body<char>>;

// In the place of a model's run.
void work(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

class EchoConnection : public std::enable_shared_from_this<EchoConnection> {
 public:
  EchoConnection(tcp::socket socket, const Response& answer, std::chrono::microseconds run)
      : stream_(std::move(socket)), answer_(answer), run_(run) {}

  void read() {
    parser_.emplace();
    parser_->body_limit(std::numeric_limits<std::uint64_t>::max());  // boost::none: refuses any
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](ErrorCode error, std::size_t) {
                       if (!error) {
                         work(self->run_);
                         self->write();
                       }
                     });
  }

 private:
  void write() {
    http::async_write(stream_, answer_, [self = shared_from_this()](ErrorCode error, std::size_t) {
      if (!error) {
        self->read();
      }
    });
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::vector_body<char>>> parser_;
  const Response& answer_;
  const std::chrono::microseconds run_;
};

class HttpEcho {
 public:
  HttpEcho(asio::io_context& io, std::uint16_t port, std::size_t reply_bytes,
           std::chrono::microseconds run)
      : io_(io), acceptor_(io, {asio::ip::address_v4::loopback(), port}), run_(run) {
    answer_.body().resize(reply_bytes);
    answer_.prepare_payload();
    accept();
  }

  std::uint16_t port() const { return acceptor_.local_endpoint().port(); }

 private:
  void accept() {
    acceptor_.async_accept(asio::make_strand(io_), [this](ErrorCode error, tcp::socket socket) {
      if (!error) {
        error = socket.set_option(tcp::no_delay(true), error);
        std::make_shared<EchoConnection>(std::move(socket), answer_, run_)->read();
      }
      accept();
    });
  }

  asio::io_context& io_;
  tcp::acceptor acceptor_;
  Response answer_{http::status::ok, 11};
  const std::chrono::microseconds run_;
};

class GrpcEcho final : public inference::GRPCInferenceService::WithRawCallbackMethod_ModelInfer<
                           inference::GRPCInferenceService::Service> {
 public:
  GrpcEcho(std::size_t reply_bytes, std::chrono::microseconds run)
      : answer_(std::string(reply_bytes, '\0')), run_(run) {}

  grpc::ServerUnaryReactor* ModelInfer(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer*,
                                       grpc::ByteBuffer* response) override {
    work(run_);
    *response = grpc::ByteBuffer(&answer_, 1);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  grpc::Slice answer_;
  const std::chrono::microseconds run_;
};

void serve(std::uint16_t port, std::uint16_t grpc_port, std::size_t reply_bytes,
           std::chrono::microseconds run, int num_threads) {
  asio::io_context io(num_threads);
  asio::signal_set signals(io, SIGTERM, SIGINT);
  signals.async_wait([&](ErrorCode, int) { io.stop(); });
  const HttpEcho http(io, port, reply_bytes, run);
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // as in ikbo-server
  GrpcEcho service(reply_bytes, run);
  int bound_port = 0;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort("127.0.0.1:" + std::to_string(grpc_port),
                           grpc::InsecureServerCredentials(), &bound_port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  std::printf("port=%d grpc_port=%d\n", http.port(), bound_port);
  std::fflush(stdout);
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&io] { io.run(); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  server->Shutdown(std::chrono::system_clock::now());
}

}  // namespace
}  // namespace ikbo::load

int main(int argc, char** argv) {
  std::uint16_t port = 0;
  std::uint16_t grpc_port = 0;
  std::size_t reply_bytes = 0;
  int run_us = 0;
  int num_threads = 2;
  CLI::App app("Reads requests over HTTP and gRPC and answers with zeros.", "ikbo-echo");
  app.add_option("--port", port, "For HTTP; 0: any free one, printed")->capture_default_str();
  app.add_option("--grpc-port", grpc_port, "For gRPC; 0: any free one")->capture_default_str();
  app.add_option("--reply-bytes", reply_bytes, "Size of an answer")->capture_default_str();
  app.add_option("--run-us", run_us, "Microseconds of work before an answer")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--threads", num_threads, "For HTTP")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    ikbo::load::serve(port, grpc_port, reply_bytes, std::chrono::microseconds(run_us), num_threads);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ikbo-echo: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
