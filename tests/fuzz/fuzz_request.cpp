// SPDX-License-Identifier: Apache-2.0
// Fuzzes the request parsers: whatever the bytes are, they must make tensors of them that fit the
// model, or throw RequestError. The first line of the input is the value of the HTTP header
// Inference-Header-Content-Length (an empty one: no such header), the rest is the body; after a
// first line "grpc" the rest is a message of gRPC, after "gzip" or "deflate" a packed body, after
// "chunked" a body in chunks.
#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "ikbo/runtime/batch.h"
#include "server/body_plan.h"
#include "server/chunked_body.h"
#include "server/grpc_codec.h"
#include "server/http_coding.h"
#include "server/request_error.h"
#include "server/v2_codec.h"

namespace {

using namespace ikbo;
using namespace ikbo::server;

constexpr std::size_t kMaxBodyBytes = std::size_t{1} << 20;

runtime::TensorSpec spec(const char* name, DType dtype, runtime::Shape shape, runtime::Role role) {
  runtime::TensorSpec result;
  result.name = name;
  result.dtype = dtype;
  result.shape = std::move(shape);
  result.role = role;
  return result;
}

// A tensor of every kind that the parser tells apart.
runtime::Manifest make_manifest() {
  using runtime::Role;
  runtime::Manifest manifest;
  manifest.model_name = "fuzz";
  manifest.inputs = {spec("u", DType::kFloat32, {-1, 2}, Role::kUser),
                     spec("h", DType::kBFloat16, {-1, 1}, Role::kUser),
                     spec("c", DType::kFloat64, {-1, 2, 2}, Role::kCandidate),
                     spec("n", DType::kInt8, {-1}, Role::kCandidate),
                     spec("f", DType::kBool, {-1}, Role::kCandidate),
                     spec("i", DType::kInt32, {-1}, Role::kIndex)};
  manifest.outputs = {spec("s", DType::kFloat32, {-1}, Role::kCandidate),
                      spec("t", DType::kFloat16, {-1, 3}, Role::kUser)};
  manifest.max_users = 3;
  manifest.max_candidates = 5;
  return manifest;
}

void demand(bool holds) {
  if (!holds) {
    std::abort();
  }
}

// Reads every byte of every tensor, which is where the sanitizers look.
void read_all(const runtime::Manifest& manifest, const InferCall& call) {
  demand(!call.outputs.empty());
  for (const WantedOutput& wanted : call.outputs) {
    demand(wanted.index < manifest.outputs.size());
  }
  unsigned sum = 0;
  for (const runtime::TensorView& tensor : call.request.tensors) {
    const auto* bytes = static_cast<const std::uint8_t*>(tensor.data);
    for (std::size_t i = 0; i < tensor.bytes; ++i) {
      sum += bytes[i];
    }
  }
  volatile unsigned sink = sum;
  static_cast<void>(sink);
}

std::shared_ptr<RequestBody> body_of(std::string_view bytes, std::size_t json_size) {
  auto body = std::make_shared<RequestBody>(bytes.size(), json_size);
  std::transform(bytes.begin(), bytes.end(), body->bytes().begin(),
                 [](char c) { return std::byte(c); });
  return body;
}

void parse_message(std::string_view bytes) {
  const runtime::Manifest manifest = make_manifest();
  auto message = std::make_shared<inference::ModelInferRequest>();
  if (message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    read_all(manifest, decode_infer(manifest, std::move(message)));
  }
}

void parse_packed(std::string_view coding, std::string_view bytes) {
  MemoryBudget memory(kMaxBodyBytes);
  const auto body = unpack_body(*body_of(bytes, bytes.size()), *coding_of(coding), bytes.size() / 2,
                                kMaxBodyBytes, memory);
  demand(body->bytes().size() <= kMaxBodyBytes && body->json().size() == bytes.size() / 2);
}

void parse_chunks(std::string_view bytes) {
  namespace http = boost::beast::http;
  constexpr std::string_view kHead = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
  MemoryBudget memory(kMaxBodyBytes);
  ChunkedBody body(kMaxBodyBytes / 4, memory);
  http::request_parser<http::empty_body> parser;
  parser.body_limit(std::numeric_limits<std::uint64_t>::max());
  boost::system::error_code error;
  parser.put(boost::asio::buffer(kHead.data(), kHead.size()), error);
  demand(!error && parser.is_header_done());
  body.collect_from(parser);
  parser.eager(true);
  for (std::size_t used = 1; used > 0 && !error && !parser.is_done();) {
    used = parser.put(boost::asio::buffer(bytes.data(), bytes.size()), error);
    bytes.remove_prefix(used);
  }
  if (!error && parser.is_done()) {
    demand(body.finish(std::nullopt)->json().size() <= kMaxBodyBytes / 4);
  }
}

void parse(std::string_view header, std::string_view bytes) {
  const runtime::Manifest manifest = make_manifest();
  BodyFields fields;
  fields.content_length = bytes.size();
  if (!header.empty()) {
    fields.json_size = header;
  }
  const BodyPlan plan = plan_body(fields, kMaxBodyBytes);
  const std::size_t json_size = plan.json_size.value_or(plan.size);
  demand(plan.size == bytes.size() && json_size <= plan.size);
  const InferCall call = decode_infer(manifest, body_of(bytes, json_size));
  runtime::check_request(manifest, call.request);
  read_all(manifest, call);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t line = input.find('\n');
  const std::string_view header = line == std::string_view::npos ? "" : input.substr(0, line);
  const std::string_view rest = input.substr(line == std::string_view::npos ? 0 : line + 1);
  try {
    if (header == "grpc") {
      parse_message(rest);
    } else if (header == "gzip" || header == "deflate") {
      parse_packed(header, rest);
    } else if (header == "chunked") {
      parse_chunks(rest);
    } else {
      parse(header, rest);
    }
  } catch (const RequestError&) {
  }
  return 0;
}
