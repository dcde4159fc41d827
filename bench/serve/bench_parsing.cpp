// SPDX-License-Identifier: Apache-2.0
// From the bytes of a request in memory to a checked Request, for one request of 500 candidates and
// 64 KiB of tensors, in each form that it may come in; and what simdjson alone takes for the JSON.
#include <benchmark/benchmark.h>
#include <malloc.h>
#include <simdjson.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ikbo/runtime/manifest.h"
#include "open_inference.pb.h"
#include "server/grpc_codec.h"
#include "server/json_writer.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

using runtime::Manifest;
using runtime::Role;

constexpr std::int64_t kCandidates = 500;
constexpr std::int64_t kUserWidth = 384;
constexpr std::int64_t kCandidateWidth = 30;
constexpr std::int64_t kMaxId = 100'000;

runtime::TensorSpec spec(const char* name, DType dtype, runtime::Shape shape, Role role) {
  return {.name = name,
          .dtype = dtype,
          .shape = std::move(shape),
          .role = role,
          .values = dtype == DType::kInt32 ? std::optional<runtime::ValueRange>({0, kMaxId})
                                           : std::nullopt};
}

Manifest manifest() {
  Manifest manifest;
  manifest.model_name = "ranker";
  manifest.model_version = std::string("1");
  manifest.inputs = {spec("x_user", DType::kFloat32, {-1, kUserWidth}, Role::kUser),
                     spec("x_cand", DType::kFloat32, {-1, kCandidateWidth}, Role::kCandidate),
                     spec("item", DType::kInt32, {-1}, Role::kCandidate),
                     spec("cand_to_user", DType::kInt32, {-1}, Role::kIndex)};
  manifest.outputs = {spec("score", DType::kFloat32, {-1}, Role::kCandidate)};
  manifest.max_users = 8;
  manifest.max_candidates = 8 * kCandidates;
  return manifest;
}

// One input's values.
struct Values {
  std::string name;
  std::string datatype;
  std::vector<std::int64_t> shape;
  std::vector<float> floats;
  std::vector<std::int32_t> integers;

  std::string_view bytes() const {
    return floats.empty() ? std::string_view(reinterpret_cast<const char*>(integers.data()),
                                             integers.size() * sizeof(std::int32_t))
                          : std::string_view(reinterpret_cast<const char*>(floats.data()),
                                             floats.size() * sizeof(float));
  }
};

std::vector<Values> values() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<std::int32_t> id(0, kMaxId);
  std::vector<Values> all = {{"x_user", "FP32", {1, kUserWidth}, {}, {}},
                             {"x_cand", "FP32", {kCandidates, kCandidateWidth}, {}, {}},
                             {"item", "INT32", {kCandidates}, {}, {}},
                             {"cand_to_user", "INT32", {kCandidates}, {}, {}}};
  for (std::int64_t i = 0; i < kUserWidth; ++i) {
    all[0].floats.push_back(normal(random));
  }
  for (std::int64_t i = 0; i < kCandidates * kCandidateWidth; ++i) {
    all[1].floats.push_back(normal(random));
  }
  for (std::int64_t i = 0; i < kCandidates; ++i) {
    all[2].integers.push_back(id(random));
    all[3].integers.push_back(0);
  }
  return all;
}

void write_head(const Values& input, JsonWriter& writer) {
  writer.key("name").string(input.name);
  writer.key("datatype").string(input.datatype);
  writer.key("shape").begin_array();
  for (const std::int64_t extent : input.shape) {
    writer.number(extent);
  }
  writer.end_array();
}

std::shared_ptr<const RequestBody> body_of(const std::string& json, const std::string& binary) {
  auto body = std::make_shared<RequestBody>(json.size() + binary.size(), json.size());
  std::memcpy(body->bytes().data(), json.data(), json.size());
  std::memcpy(body->bytes().data() + json.size(), binary.data(), binary.size());
  return body;
}

std::shared_ptr<const RequestBody> binary_body() {
  std::string json;
  std::string binary;
  JsonWriter writer(json);
  writer.begin_object().key("inputs").begin_array();
  for (const Values& input : values()) {
    writer.begin_object();
    write_head(input, writer);
    writer.key("parameters").begin_object();
    writer.key("binary_data_size").number(input.bytes().size()).end_object().end_object();
    binary += input.bytes();
  }
  writer.end_array().key("parameters").begin_object();
  writer.key("binary_data_output").boolean(true).end_object().end_object();
  return body_of(json, binary);
}

std::shared_ptr<const RequestBody> json_body() {
  std::string json;
  JsonWriter writer(json);
  writer.begin_object().key("inputs").begin_array();
  for (const Values& input : values()) {
    writer.begin_object();
    write_head(input, writer);
    writer.key("data").begin_array();
    for (const float value : input.floats) {
      writer.number(value);
    }
    for (const std::int32_t value : input.integers) {
      writer.number(value);
    }
    writer.end_array().end_object();
  }
  writer.end_array().end_object();
  return body_of(json, "");
}

std::string protobuf_body() {
  inference::ModelInferRequest message;
  message.set_model_name("ranker");
  for (const Values& input : values()) {
    auto& described = *message.add_inputs();
    described.set_name(input.name);
    described.set_datatype(input.datatype);
    described.mutable_shape()->Add(input.shape.begin(), input.shape.end());
    message.add_raw_input_contents(std::string(input.bytes()));
  }
  return message.SerializeAsString();
}

void count_bytes(benchmark::State& state, std::size_t body) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(body));
}

void decode_body(benchmark::State& state, const std::shared_ptr<const RequestBody>& body) {
  const Manifest ranker = manifest();
  for (auto _ : state) {
    InferCall call = decode_infer(ranker, body);
    benchmark::DoNotOptimize(call);
  }
  count_bytes(state, body->json().size() + body->binary().size());
}

void binary(benchmark::State& state) { decode_body(state, binary_body()); }
void json(benchmark::State& state) { decode_body(state, json_body()); }

void protobuf(benchmark::State& state) {
  const Manifest ranker = manifest();
  const std::string bytes = protobuf_body();
  for (auto _ : state) {
    auto message = std::make_shared<inference::ModelInferRequest>();
    if (!message->ParseFromString(bytes)) {
      state.SkipWithError("the message does not parse");
      break;
    }
    InferCall call = decode_infer(ranker, std::move(message));
    benchmark::DoNotOptimize(call);
  }
  count_bytes(state, bytes.size());
}

// A document of simdjson, with a parser that keeps its memory.
void bare_simdjson(benchmark::State& state) {
  const std::shared_ptr<const RequestBody> body = json_body();
  simdjson::dom::parser parser;
  for (auto _ : state) {
    simdjson::dom::element root;
    if (parser.parse(body->json().data(), body->json().size(), false).get(root) !=
        simdjson::SUCCESS) {
      state.SkipWithError("the document does not parse");
      break;
    }
    benchmark::DoNotOptimize(root);
  }
  count_bytes(state, body->json().size());
}

BENCHMARK(binary);
BENCHMARK(protobuf);
BENCHMARK(json);
BENCHMARK(bare_simdjson);

}  // namespace
}  // namespace ikbo::server

int main(int argc, char** argv) {
  // As ikbo-server does: freed memory is kept.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
