// SPDX-License-Identifier: Apache-2.0
// Why a request was refused or a connection was dropped: one list, which the HTTP status, the
// gRPC status and the metrics follow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ikbo::server {

enum class ErrorKind : std::int8_t {
  kBadRequest,           // not HTTP, not the protocol, or tensors that do not fit the model
  kUnauthenticated,      // no token, or one that is not accepted for this
  kForbidden,            // the server's configuration does not allow it
  kNotFound,             // no such path, model or version
  kMethodNotAllowed,     // the path exists, not for this method
  kBodyTooLarge,         // over --max-body-bytes
  kUnsupportedEncoding,  // a body in another coding than gzip and deflate
  kQueueFull,            // --max-queue requests of the model are waiting
  kHeadersTooLarge,      // request line and header fields over the limit
  kExecutionFailed,      // the model's run failed
  kLoadFailed,           // a model could not be loaded
  kModelUnavailable,     // the model's device failed: it is being loaded again
  kOutOfMemory,          // no memory for a request or its answer
  kDeadlineExceeded,     // the client's deadline passed before the run
  kConnectionLimit,      // --max-connections are open
  kTlsHandshake,         // the client does not speak TLS, or has no certificate that is accepted
  kTimeout,              // the client was too slow: the connection is closed without an answer
  kDisconnected,         // the client went away in the middle of a request or of its answer
};
inline constexpr int kNumErrorKinds = static_cast<int>(ErrorKind::kDisconnected) + 1;

struct ErrorKindInfo {
  std::string_view name;  // label value in /metrics
  unsigned status;        // HTTP status, 0 when there is nobody left to answer
  int grpc_status;        // the same as a number of gRPC's status codes
};

// Those of gRPC's status codes that the list below uses.
enum GrpcStatus : std::int8_t {
  kGrpcInvalidArgument = 3,
  kGrpcDeadlineExceeded = 4,
  kGrpcNotFound = 5,
  kGrpcPermissionDenied = 7,
  kGrpcResourceExhausted = 8,
  kGrpcUnimplemented = 12,
  kGrpcInternal = 13,
  kGrpcUnavailable = 14,
  kGrpcUnauthenticated = 16,
};

inline constexpr ErrorKindInfo info_of(ErrorKind kind) {
  constexpr ErrorKindInfo kInfos[] = {
      {"bad_request", 400, kGrpcInvalidArgument},
      {"unauthenticated", 401, kGrpcUnauthenticated},
      {"forbidden", 403, kGrpcPermissionDenied},
      {"not_found", 404, kGrpcNotFound},
      {"method_not_allowed", 405, kGrpcUnimplemented},
      {"body_too_large", 413, kGrpcResourceExhausted},
      {"unsupported_encoding", 415, kGrpcUnimplemented},
      {"queue_full", 429, kGrpcResourceExhausted},
      {"headers_too_large", 431, kGrpcResourceExhausted},
      {"execution_failed", 500, kGrpcInternal},
      {"load_failed", 500, kGrpcInternal},
      {"model_unavailable", 503, kGrpcUnavailable},
      {"out_of_memory", 503, kGrpcResourceExhausted},
      {"deadline_exceeded", 504, kGrpcDeadlineExceeded},
      {"connection_limit", 503, kGrpcUnavailable},
      {"tls_handshake", 0, kGrpcUnavailable},
      {"timeout", 0, kGrpcUnavailable},
      {"disconnected", 0, kGrpcUnavailable},
  };
  static_assert(std::size(kInfos) == kNumErrorKinds);
  return kInfos[static_cast<int>(kind)];
}

// At most `max_bytes` of a text, cut between characters of UTF-8, with what marks a cut.
std::string shortened(std::string_view text, std::size_t max_bytes);

// Its text is shortened, since it may quote what a client has sent.
class RequestError : public std::runtime_error {
 public:
  RequestError(ErrorKind kind, std::string_view text);
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws a RequestError with the streamed parts: where, what is required, what is there.
template <typename... Parts>
[[noreturn]] void refuse(ErrorKind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw RequestError(kind, text.str());
}

inline RequestError out_of_memory() {
  return RequestError(ErrorKind::kOutOfMemory, "the server has no memory for the request now");
}

// The text of an error without the position in our sources that an ikbo::Error ends with.
inline std::string client_text(const std::exception& error) {
  const std::string text = error.what();
  const std::size_t position = text.rfind(" [");
  return text.ends_with(']') && position != std::string::npos ? text.substr(0, position) : text;
}

}  // namespace ikbo::server
