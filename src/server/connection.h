// SPDX-License-Identifier: Apache-2.0
// One client's connection: requests one after another, each read whole, answered, then the next.
//
//   (TLS handshake) -> idle -> head -> (100 Continue) -> body -> router -> reply -> idle
//
// Everything runs on the connection's strand, but for one step: a reply that is quick to make is
// made and sent by the thread that has it, a worker as a rule, since waking another one would take
// longer. Each step has its timeout; a step that fails ends the connection, with an error reply
// first where the client can still be told.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/serializer.hpp>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "server/body_plan.h"
#include "server/chunked_body.h"
#include "server/client_stream.h"
#include "server/http_message.h"
#include "server/http_server.h"
#include "server/reply_body.h"
#include "server/request_error.h"

namespace ikbo::server {

class Connection;

constexpr std::size_t kReadAhead = 16 * 1024;
// What Beast may buffer of a head, of a chunk's line or of a trailer.
constexpr std::size_t kMaxBuffered = 64 * 1024;

inline std::string_view view(boost::string_view text) { return {text.data(), text.size()}; }

// Whether Beast found the bytes to be no HTTP, or to end too early.
bool is_http_error(const boost::system::error_code& error);
RequestError no_memory();

// What the connections of a server share; outlives them all.
struct ConnectionContext {
  const HttpOptions& options;
  boost::asio::ssl::context* tls;  // nullptr: none
  Router& router;
  ServerMetrics& metrics;
  MemoryBudget& memory;
  RequestObserver* observer;  // nullptr: none
  const Logger& logger;
  std::function<void(Connection*)> on_end;  // by any thread
  std::atomic<bool> is_stopping = false;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(boost::asio::ip::tcp::socket socket, ConnectionContext& context);
  ~Connection();

  void start();
  // Ends the connection after the request under way, at once when there is none. Any thread.
  void stop();

 private:
  using ErrorCode = boost::system::error_code;

  void on_handshake(ErrorCode error);
  void next_request();
  void on_first_bytes(ErrorCode error, std::size_t bytes);
  void read_head();
  void read_more_of_head();
  void on_head(ErrorCode error);
  void start_body();
  void send_continue();
  std::optional<std::size_t> received_json_size() const;
  void read_body();
  void read_more_of_body(std::span<std::byte> unread);
  bool hold(std::size_t bytes);
  void read_chunks();
  void on_chunks(ErrorCode error);
  void dispatch();
  // The rest of the request, if any, stays unread: the connection ends after the reply.
  void refuse_and_end(const RequestError& error);
  // By any thread: while the router has a request, nothing else happens to the connection.
  void take(PendingReply pending);
  void reply(HttpReply reply);
  void send();
  void on_replied(ErrorCode error);
  void end();
  void linger();
  void discard_input();
  void close();
  // Counts what ended a request halfway.
  void drop(ErrorCode error);
  void begin_record();
  void end_record();

  // Tells the server when all else here is gone, which uses what the server owns.
  struct End {
    ~End() { context.on_end(connection); }
    ConnectionContext& context;
    Connection* connection;
  };

  ConnectionContext& context_;
  const End end_;  // before what is to be gone
  ClientStream stream_;
  boost::beast::flat_buffer buffer_{kMaxBuffered};  // bytes received beyond what was asked for
  std::optional<boost::beast::http::request_parser<boost::beast::http::empty_body>> parser_;
  std::size_t head_bytes_ = 0;  // of this request, parsed so far
  BodyPlan plan_;
  std::optional<ChunkedBody> chunks_;  // of the body under way, when it comes in chunks
  std::shared_ptr<RequestBody> body_;
  std::shared_ptr<RequestRecord> record_;  // of the request that the router has
  std::optional<boost::beast::http::response<ReplyBody>> response_;
  std::optional<boost::beast::http::response_serializer<ReplyBody>> serializer_;  // of response_
  std::chrono::steady_clock::time_point begin_;
  bool is_idle_ = false;
  bool has_unread_body_ = false;
};

}  // namespace ikbo::server
