// SPDX-License-Identifier: Apache-2.0
// A client's TCP connection with or without TLS on it, as a stream that Asio's and Beast's
// operations take.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>
#include <optional>
#include <utility>

namespace ikbo::server {

class ClientStream {
 public:
  using executor_type = boost::beast::tcp_stream::executor_type;

  // Without `tls` the bytes are the client's own. `tls` must outlive the stream.
  ClientStream(boost::asio::ip::tcp::socket socket, boost::asio::ssl::context* tls)
      : tcp_(std::move(socket)) {
    if (tls != nullptr) {
      tls_.emplace(tcp_, *tls);
    }
  }

  executor_type get_executor() { return tcp_.get_executor(); }
  // What is below TLS; timeouts are set here.
  boost::beast::tcp_stream& tcp() { return tcp_; }
  bool has_tls() const { return tls_.has_value(); }

  template <typename Buffers, typename Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (has_tls()) {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      tcp_.async_read_some(buffers, std::forward<Handler>(handler));
    }
  }

  template <typename Buffers, typename Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (has_tls()) {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      tcp_.async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

  // With TLS only: its first and its last messages.
  template <typename Handler>
  void async_handshake(Handler&& handler) {
    tls_->async_handshake(boost::asio::ssl::stream_base::server, std::forward<Handler>(handler));
  }
  template <typename Handler>
  void async_shutdown(Handler&& handler) {
    tls_->async_shutdown(std::forward<Handler>(handler));
  }

 private:
  boost::beast::tcp_stream tcp_;
  std::optional<boost::beast::ssl_stream<boost::beast::tcp_stream&>> tls_;
};

}  // namespace ikbo::server
