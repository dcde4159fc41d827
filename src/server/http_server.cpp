// SPDX-License-Identifier: Apache-2.0
#include "server/http_server.h"

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <csignal>
#include <mutex>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ikbo/error.h"
#include "server/connection.h"
#include "server/thread_name.h"

namespace ikbo::server {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

void use_tls_files(const TlsOptions& options, asio::ssl::context& context) {
  const TlsFiles files = read_tls_files(options);
  const std::string* path = &options.certificate;
  try {
    context.use_certificate_chain(asio::buffer(files.certificate));
    path = &options.key;
    context.use_private_key(asio::buffer(files.key), asio::ssl::context::pem);
    if (!files.client_ca.empty()) {
      path = &options.client_ca;
      context.add_certificate_authority(asio::buffer(files.client_ca));
      context.set_verify_mode(asio::ssl::verify_peer | asio::ssl::verify_fail_if_no_peer_cert);
    }
  } catch (const boost::system::system_error& error) {
    IKBO_CHECK(false, "--tls-cert, --tls-key, --tls-client-ca: must be PEM files that fit; got ",
               *path, ": ", error.code().message());
  }
}

std::unique_ptr<asio::ssl::context> make_tls_context(const TlsOptions& options) {
  auto context = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_server);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  SSL_CTX_set_options(context->native_handle(), SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  // A session with a verified client is resumed only where it began.
  constexpr unsigned char kSessionContext[] = "ikbo-server";
  SSL_CTX_set_session_id_context(context->native_handle(), kSessionContext,
                                 sizeof(kSessionContext) - 1);
  use_tls_files(options, *context);
  return context;
}

}  // namespace

// The acceptor, the signals and the timers share one strand; connections have their own.
class HttpServer::Impl {
 public:
  Impl(const HttpOptions& options, const TlsOptions& tls, Router& router, Core& core,
       const Logger& logger)
      : options_(options),
        router_(router),
        tls_(tls.is_enabled() ? make_tls_context(tls) : nullptr),
        context_{options_,
                 tls_.get(),
                 router,
                 core.metrics,
                 core.request_memory,
                 core.observer.has_value() ? &*core.observer : nullptr,
                 logger,
                 [this](Connection* ended) { forget(ended); }},
        io_(options.num_threads),
        strand_(asio::make_strand(io_)),
        acceptor_(strand_),
        signals_(strand_, SIGTERM, SIGINT),
        hangups_(strand_, SIGHUP),
        timer_(strand_) {
    listen();
  }

  std::uint16_t port() const { return acceptor_.local_endpoint().port(); }

  bool run(const std::function<void()>& on_stop, const std::function<void()>& on_hangup) {
    on_stop_ = on_stop;
    on_hangup_ = on_hangup;
    signals_.async_wait([this](error_code error, int signal) {
      if (!error) {
        stop(signal);
      }
    });
    wait_for_hangup();
    accept();
    std::vector<std::thread> threads;
    for (int i = 1; i < options_.num_threads; ++i) {
      threads.emplace_back([this] {
        name_this_thread("ikbo-http");
        io_.run();
      });
    }
    io_.run();
    for (std::thread& thread : threads) {
      thread.join();
    }
    const std::lock_guard lock(mutex_);
    return is_drained_;
  }

 private:
  void listen() {
    try {
      const tcp::endpoint endpoint(asio::ip::make_address(options_.host), options_.port);
      acceptor_.open(endpoint.protocol());
      acceptor_.set_option(tcp::acceptor::reuse_address(true));
      acceptor_.bind(endpoint);
      acceptor_.listen();
    } catch (const boost::system::system_error& error) {
      IKBO_CHECK(false, "--host, --port: must be a free address of this machine; got ",
                 options_.host, ":", options_.port, ": ", error.code().message());
    }
  }

  void wait_for_hangup() {
    hangups_.async_wait([this](error_code error, int) {
      if (!error) {
        on_hangup_();
        wait_for_hangup();
      }
    });
  }

  void accept() {
    acceptor_.async_accept(asio::make_strand(io_), [this](error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) {
        return;
      }
      if (error) {
        return accept_later(error);
      }
      welcome(std::move(socket));
      accept();
    });
  }

  // Out of file descriptors, most likely: trying again at once would only spin.
  void accept_later(error_code error) {
    context_.logger.write(LogLevel::kWarning, "accept_failed", {{"error", error.message()}});
    timer_.expires_after(std::chrono::milliseconds(100));
    timer_.async_wait([this](error_code wait_error) {
      if (!wait_error) {
        accept();
      }
    });
  }

  void welcome(tcp::socket socket) {
    error_code ignored;
    ignored = socket.set_option(tcp::no_delay(true), ignored);
    if (num_connections() >= options_.max_connections) {
      return turn_away(socket);
    }
    const auto connection = std::make_shared<Connection>(std::move(socket), context_);
    {
      const std::lock_guard lock(mutex_);
      connections_.emplace(connection.get(), connection);
    }
    connection->start();
  }

  std::size_t num_connections() {
    const std::lock_guard lock(mutex_);
    return connections_.size();
  }

  // Never called with the mutex: letting go of a connection may end it, which takes the mutex.
  std::vector<std::shared_ptr<Connection>> open_connections() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Connection>> open;
    open.reserve(connections_.size());
    for (const auto& [key, connection] : connections_) {
      open.push_back(connection.lock());
    }
    return open;
  }

  // With TLS there is nothing to say before the handshake. The few bytes fit into the buffer of a
  // new socket: no wait, whatever the client does. What it has sent is read, since closing with
  // unread input would reset the connection under the reply.
  void turn_away(tcp::socket& socket) {
    if (tls_ != nullptr) {
      return context_.metrics.count(ErrorKind::kConnectionLimit);
    }
    const HttpReply reply = router_.error_reply(
        RequestError(ErrorKind::kConnectionLimit, "the server must have room for the connection; " +
                                                      std::to_string(options_.max_connections) +
                                                      " are open (--max-connections)"));
    const std::string text =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: " + reply.content_type +
        "\r\nConnection: close\r\nContent-Length: " + std::to_string(reply.text.size()) +
        "\r\n\r\n" + reply.text;
    error_code ignored;
    ignored = socket.non_blocking(true, ignored);
    socket.write_some(asio::buffer(text), ignored);
    ignored = socket.shutdown(tcp::socket::shutdown_send, ignored);
    std::array<char, 16 * 1024> unread;
    socket.read_some(asio::buffer(unread), ignored);
  }

  void stop(int signal) {
    context_.logger.write(
        LogLevel::kInfo, "stopping",
        {{"signal", signal}, {"connections", context_.metrics.connections.load()}});
    on_stop_();
    context_.is_stopping = true;
    error_code ignored;
    ignored = acceptor_.close(ignored);
    timer_.expires_after(options_.drain_timeout);
    timer_.async_wait([this](error_code error) {
      if (!error) {
        io_.stop();
      }
    });
    for (const std::shared_ptr<Connection>& connection : open_connections()) {
      if (connection != nullptr) {
        connection->stop();
      }
    }
    const std::lock_guard lock(mutex_);
    end_if_drained();
  }

  void forget(Connection* ended) {
    const std::lock_guard lock(mutex_);
    connections_.erase(ended);
    end_if_drained();
  }

  // With the mutex.
  void end_if_drained() {
    if (context_.is_stopping && connections_.empty()) {
      is_drained_ = true;
      io_.stop();
    }
  }

  const HttpOptions options_;
  Router& router_;
  const std::unique_ptr<asio::ssl::context> tls_;
  ConnectionContext context_;
  std::function<void()> on_stop_;
  std::function<void()> on_hangup_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::unordered_map<Connection*, std::weak_ptr<Connection>> connections_;
  bool is_drained_ = false;

  asio::io_context io_;
  asio::strand<asio::io_context::executor_type> strand_;
  tcp::acceptor acceptor_;
  asio::signal_set signals_;
  asio::signal_set hangups_;
  asio::steady_timer timer_;
};

void check_host(const HttpOptions& options) {
  error_code error;
  const asio::ip::address address = asio::ip::make_address(options.host, error);
  IKBO_CHECK(!error, "--host: must be an IP address; got ", options.host);
  IKBO_CHECK(address.is_loopback() || options.allow_remote,
             "--host: must be a loopback address unless --allow-remote is given; got ",
             options.host);
}

bool is_certificate_current(const TlsOptions& tls) {
  const std::unique_ptr<asio::ssl::context> context = make_tls_context(tls);
  const X509* certificate = SSL_CTX_get0_certificate(context->native_handle());
  return X509_cmp_current_time(X509_get0_notBefore(certificate)) < 0 &&
         X509_cmp_current_time(X509_get0_notAfter(certificate)) > 0;
}

HttpServer::HttpServer(const HttpOptions& options, const TlsOptions& tls, Router& router,
                       Core& core, const Logger& logger)
    : impl_(std::make_unique<Impl>(options, tls, router, core, logger)) {}
HttpServer::~HttpServer() = default;
std::uint16_t HttpServer::port() const { return impl_->port(); }
bool HttpServer::run(const std::function<void()>& on_stop, const std::function<void()>& on_hangup) {
  return impl_->run(on_stop, on_hangup);
}

}  // namespace ikbo::server
