// SPDX-License-Identifier: Apache-2.0
#include "server/grpc_listener.h"

#include <sys/stat.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "ikbo/error.h"
#include "server/request_error.h"
#include "server/thread_name.h"

namespace ikbo::server {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

// A socket that gRPC has. Its descriptor may be another file's once gRPC has closed it; the inode
// tells.
struct TakenSocket {
  int descriptor = -1;
  ino_t inode = 0;

  static TakenSocket of(int descriptor) { return {descriptor, inode_of(descriptor)}; }
  bool is_open() const { return inode != 0 && inode_of(descriptor) == inode; }

 private:
  // 0: not a socket.
  static ino_t inode_of(int descriptor) {
    struct stat status{};
    return fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode) ? status.st_ino : 0;
  }
};

}  // namespace

class GrpcListener::Impl {
 public:
  Impl(const std::string& host, std::uint16_t port, std::size_t max_connections,
       ServerMetrics& metrics, const Logger& logger)
      : max_connections_(max_connections), metrics_(metrics), logger_(logger) {
    try {
      const tcp::endpoint endpoint(asio::ip::make_address(host), port);
      acceptor_.open(endpoint.protocol());
      acceptor_.set_option(tcp::acceptor::reuse_address(true));
      acceptor_.set_option(tcp::no_delay(true));  // of the sockets that it accepts
      acceptor_.bind(endpoint);
      acceptor_.listen();
      port_ = acceptor_.local_endpoint().port();
    } catch (const boost::system::system_error& error) {
      IKBO_CHECK(false, "--host, --grpc-port: must be a free address of this machine; got ", host,
                 ":", port, ": ", error.code().message());
    }
  }

  ~Impl() { stop(); }

  std::uint16_t port() const { return port_; }

  void start(Take take) {
    take_ = std::move(take);
    accept();
    thread_ = std::thread([this] {
      name_this_thread("ikbo-grpc-in");
      io_.run();
    });
  }

  void stop() {
    io_.stop();
    if (thread_.joinable()) {
      thread_.join();
    }
    error_code ignored;
    ignored = acceptor_.close(ignored);
  }

 private:
  void accept() {
    acceptor_.async_accept([this](error_code error, tcp::socket socket) {
      if (error) {
        return accept_later(error);
      }
      if (has_room()) {
        hand_over(std::move(socket));
      } else {
        metrics_.count(ErrorKind::kConnectionLimit);
      }
      accept();
    });
  }

  // Out of file descriptors, most likely: trying again at once would only spin.
  void accept_later(error_code error) {
    logger_.write(LogLevel::kWarning, "accept_failed", {{"error", error.message()}});
    timer_.expires_after(std::chrono::milliseconds(100));
    timer_.async_wait([this](error_code) { accept(); });
  }

  // Looks for connections that have ended only when it matters.
  bool has_room() {
    if (taken_.size() >= max_connections_) {
      std::erase_if(taken_, [](const TakenSocket& socket) { return !socket.is_open(); });
    }
    return taken_.size() < max_connections_;
  }

  void hand_over(tcp::socket socket) {
    error_code error;
    error = socket.non_blocking(true, error);
    const int descriptor = error ? -1 : socket.release(error);
    if (error) {
      return;  // it has gone already
    }
    taken_.push_back(TakenSocket::of(descriptor));
    take_(acceptor_.native_handle(), descriptor);
  }

  const std::size_t max_connections_;
  ServerMetrics& metrics_;
  const Logger& logger_;
  Take take_;
  asio::io_context io_{1};
  tcp::acceptor acceptor_{io_};
  asio::steady_timer timer_{io_};
  std::uint16_t port_ = 0;
  std::vector<TakenSocket> taken_;
  std::thread thread_;
};

GrpcListener::GrpcListener(const std::string& host, std::uint16_t port, std::size_t max_connections,
                           ServerMetrics& metrics, const Logger& logger)
    : impl_(std::make_unique<Impl>(host, port, max_connections, metrics, logger)) {}
GrpcListener::~GrpcListener() = default;
std::uint16_t GrpcListener::port() const { return impl_->port(); }
void GrpcListener::start(Take take) { impl_->start(std::move(take)); }
void GrpcListener::stop() { impl_->stop(); }

}  // namespace ikbo::server
