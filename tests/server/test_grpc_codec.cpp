// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fixtures.h"
#include "server/grpc_codec.h"

namespace ikbo::server {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;
using testing::bytes_of;
using testing::error_of;
using testing::expect_contains;
using testing::manifest;
using testing::values_of;

ModelInferRequest::InferInputTensor& add_input(ModelInferRequest& request, const std::string& name,
                                               const std::string& datatype,
                                               const std::vector<std::int64_t>& shape) {
  auto& input = *request.add_inputs();
  input.set_name(name);
  input.set_datatype(datatype);
  input.mutable_shape()->Add(shape.begin(), shape.end());
  return input;
}

// One user and two candidates, without the index, as testing::valid_json.
std::shared_ptr<ModelInferRequest> typed() {
  auto request = std::make_shared<ModelInferRequest>();
  request->set_id("r1");
  const auto fill = [](auto& field, const auto& values) {
    field.Add(values.begin(), values.end());
  };
  fill(*add_input(*request, "x_user", "FP32", {1, 2}).mutable_contents()->mutable_fp32_contents(),
       std::vector<float>{0.5, 2});
  fill(*add_input(*request, "x_cand", "FP32", {2, 3}).mutable_contents()->mutable_fp32_contents(),
       std::vector<float>{1, 2, 3, 4, 5, 6});
  fill(*add_input(*request, "count", "INT64", {2}).mutable_contents()->mutable_int64_contents(),
       std::vector<std::int64_t>{7, -8});
  fill(*add_input(*request, "is_new", "BOOL", {2}).mutable_contents()->mutable_bool_contents(),
       std::vector<bool>{true, false});
  return request;
}

std::shared_ptr<ModelInferRequest> raw() {
  auto request = typed();
  for (auto& input : *request->mutable_inputs()) {
    input.clear_contents();
  }
  request->add_raw_input_contents(bytes_of<float>({0.5, 2}));
  request->add_raw_input_contents(bytes_of<float>({1, 2, 3, 4, 5, 6}));
  request->add_raw_input_contents(bytes_of<std::int64_t>({7, -8}));
  request->add_raw_input_contents(bytes_of<char>({1, 0}));
  return request;
}

template <typename T>
std::vector<T> input_values(const InferCall& call, std::size_t i) {
  return values_of<T>(call.request.tensors[i].data, call.request.tensors[i].bytes);
}

void expect_refused(const std::shared_ptr<ModelInferRequest>& request, const std::string& part,
                    const runtime::Manifest& model = manifest()) {
  const RequestError error = error_of([&] { decode_infer(model, request); });
  EXPECT_EQ(error.kind(), ErrorKind::kBadRequest);
  expect_contains(error.what(), "model " + model.model_name + ": ");
  expect_contains(error.what(), part);
}

TEST(GrpcCodec, ReadsRawAndTypedContentsWhereTheyLie) {
  for (const auto& request : {typed(), raw()}) {
    const InferCall call = decode_infer(manifest(), request);
    EXPECT_EQ(call.id, "r1");
    EXPECT_EQ(call.request.num_users, 1);
    EXPECT_EQ(call.request.num_candidates, 2);
    EXPECT_EQ(input_values<float>(call, 0), (std::vector<float>{0.5, 2}));
    EXPECT_EQ(input_values<float>(call, 1), (std::vector<float>{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(input_values<std::int64_t>(call, 2), (std::vector<std::int64_t>{7, -8}));
    EXPECT_EQ(input_values<char>(call, 3), (std::vector<char>{1, 0}));
    EXPECT_TRUE(call.request.tensors[4].is_absent());
    ASSERT_EQ(call.outputs.size(), 2u);
    EXPECT_EQ(call.outputs[0].is_binary, request->raw_input_contents_size() > 0);
    const void* expected = request->raw_input_contents_size() > 0
                               ? static_cast<const void*>(request->raw_input_contents(1).data())
                               : request->inputs(1).contents().fp32_contents().data();
    EXPECT_EQ(call.request.tensors[1].data, expected);
  }
}

TEST(GrpcCodec, ReadsTheUserKey) {
  auto request = raw();
  EXPECT_EQ(decode_infer(manifest(), request).request.user_key, "");
  (*request->mutable_parameters())["user_key"].set_string_param("ann");
  const InferCall call = decode_infer(manifest(), request);
  EXPECT_EQ(call.request.user_key, "ann");
  (*request->mutable_parameters())["user_key"].set_int64_param(7);
  expect_refused(request, "parameter 'user_key' must be a string; got one of another type");
}

TEST(GrpcCodec, ReadsTheTimeout) {
  auto request = raw();
  EXPECT_EQ(decode_infer(manifest(), request).timeout, std::nullopt);
  (*request->mutable_parameters())["timeout"].set_int64_param(1500);
  EXPECT_EQ(decode_infer(manifest(), request).timeout, std::chrono::microseconds(1500));
  (*request->mutable_parameters())["timeout"].set_int64_param(-1);
  expect_refused(request, "parameter 'timeout' must be a number of microseconds from 0 on; got -1");
  (*request->mutable_parameters())["timeout"].set_string_param("1");
  expect_refused(request, "parameter 'timeout' must be an int64; got one of another type");
}

TEST(GrpcCodec, TheCallKeepsTheMessage) {
  std::weak_ptr<ModelInferRequest> watched;
  {
    auto request = raw();
    watched = request;
    const InferCall call = decode_infer(manifest(), std::move(request));
    EXPECT_FALSE(watched.expired());
    EXPECT_EQ(input_values<float>(call, 0), (std::vector<float>{0.5, 2}));
  }
  EXPECT_TRUE(watched.expired());
}

// One candidate input of `dtype`.
runtime::Manifest narrow_manifest(DType dtype) {
  runtime::Manifest model = testing::plain_manifest();
  model.inputs[0].dtype = dtype;
  model.inputs[0].shape = {-1};
  return model;
}

template <typename T>
void expect_narrowed(DType dtype, const std::string& datatype) {
  const std::vector<T> values = {std::numeric_limits<T>::min(), 1, std::numeric_limits<T>::max()};
  const auto request_of = [&](std::int64_t last) {
    auto request = std::make_shared<ModelInferRequest>();
    auto& contents = *add_input(*request, "x", datatype, {3}).mutable_contents();
    for (const std::int64_t value : {std::int64_t{values[0]}, std::int64_t{1}, last}) {
      if (std::is_signed_v<T>) {
        contents.add_int_contents(static_cast<std::int32_t>(value));
      } else {
        contents.add_uint_contents(static_cast<std::uint32_t>(value));
      }
    }
    return request;
  };
  const InferCall call = decode_infer(narrow_manifest(dtype), request_of(values[2]));
  EXPECT_EQ(input_values<T>(call, 0), values);
  expect_refused(request_of(std::int64_t{values[2]} + 1),
                 "element 2 must fit " + datatype + "; got " + std::to_string(values[2] + 1),
                 narrow_manifest(dtype));
}

TEST(GrpcCodec, NarrowsTypedContents) {
  expect_narrowed<std::int8_t>(DType::kInt8, "INT8");
  expect_narrowed<std::uint8_t>(DType::kUInt8, "UINT8");
  expect_narrowed<std::int16_t>(DType::kInt16, "INT16");
}

TEST(GrpcCodec, SixteenBitFloatsTravelRaw) {
  auto request = std::make_shared<ModelInferRequest>();
  add_input(*request, "x", "BF16", {2}).mutable_contents()->add_fp32_contents(1);
  expect_refused(request, "must be sent in raw_input_contents", narrow_manifest(DType::kBFloat16));
  runtime::Manifest model = manifest();
  model.outputs[0].dtype = DType::kFloat16;
  expect_refused(typed(), "output score has datatype FP16, which is sent as binary data only; send",
                 model);
  EXPECT_TRUE(decode_infer(model, raw()).outputs[0].is_binary);
}

TEST(GrpcCodec, RefusesWhatDoesNotFit) {
  auto request = raw();
  request->mutable_raw_input_contents()->RemoveLast();
  expect_refused(request, "one element for each of the 4 inputs; got 3");
  request = raw();
  request->mutable_raw_input_contents(2)->pop_back();
  expect_refused(request,
                 "input count must have 16 bytes in raw_input_contents (INT64 [2]); got 15");
  request = raw();
  request->mutable_inputs(0)->mutable_contents()->add_bytes_contents("x");
  expect_refused(request, "either contents or raw_input_contents; got both");
  request = typed();
  request->mutable_inputs(3)->mutable_contents()->add_bool_contents(true);
  expect_refused(request,
                 "2 values in bool_contents (BOOL [2]); got 3 there and 0 in other fields");
  request = typed();
  request->mutable_inputs(3)->mutable_contents()->add_uint64_contents(1);
  expect_refused(request, "got 2 there and 1 in other fields");
  request = typed();
  request->mutable_inputs(0)->set_shape(0, -1);
  expect_refused(request, "extents of shape must be integers from 0 on; got -1");
  request = typed();
  request->mutable_inputs(1)->set_shape(0, std::int64_t{1} << 62);
  expect_refused(request, "must have fewer than 2^64 bytes");
  request = typed();
  *request->add_inputs() = request->inputs(0);
  expect_refused(request, "input x_user must be given once; got it twice");
  request = typed();
  request->mutable_inputs()->RemoveLast();
  expect_refused(request, "input is_new is missing (BOOL [-1])");
  request = typed();
  (*request->mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
  expect_refused(request, "input x_user: parameter 'shared_memory_region' is not supported");
  request = typed();
  request->add_outputs()->set_name("rank");
  expect_refused(request, "output rank is unknown; it must be one of score, profile");
  request = typed();
  request->add_outputs()->set_name("score");
  request->add_outputs()->set_name("score");
  expect_refused(request, "output score must be asked for once");
}

ModelInferResponse encode(const InferCall& call, const runtime::Response& response) {
  const GrpcAnswer answer = call.outputs[0].is_binary
                                ? encode_raw_answer(manifest(), call)
                                : encode_typed_answer(manifest(), call, response);
  std::string bytes;
  for (const GrpcAnswer::Part& part : answer.parts) {
    bytes += part.bytes;
    if (part.output.has_value()) {
      const runtime::Tensor& tensor = response.outputs[*part.output];
      bytes.append(static_cast<const char*>(tensor.data), tensor.bytes);
    }
  }
  ModelInferResponse message;
  EXPECT_TRUE(message.ParseFromString(bytes));
  return message;
}

TEST(GrpcCodec, WritesAnswersThatParse) {
  const std::vector<float> score = {1, 2, 3, 4};
  const std::vector<double> profile = {0.25};
  runtime::Response response;
  response.outputs = {
      {DType::kFloat32, {2, 2}, nullptr, score.data(), score.size() * sizeof(float)},
      {DType::kFloat64, {1}, nullptr, profile.data(), sizeof(double)}};
  InferCall call = decode_infer(manifest(), raw());
  const ModelInferResponse as_raw = encode(call, response);
  EXPECT_EQ(as_raw.model_name(), "m");
  EXPECT_EQ(as_raw.model_version(), "7");
  EXPECT_EQ(as_raw.id(), "r1");
  ASSERT_EQ(as_raw.raw_output_contents_size(), 2);
  EXPECT_EQ(as_raw.raw_output_contents(0), bytes_of(score));
  EXPECT_EQ(as_raw.raw_output_contents(1), bytes_of(profile));
  EXPECT_FALSE(as_raw.outputs(0).has_contents());
  EXPECT_EQ(as_raw.outputs(0).datatype(), "FP32");
  EXPECT_EQ(as_raw.outputs(0).shape(1), 2);

  call = decode_infer(manifest(), typed());
  std::swap(call.outputs[0], call.outputs[1]);
  const ModelInferResponse as_typed = encode(call, response);
  EXPECT_EQ(as_typed.raw_output_contents_size(), 0);
  EXPECT_EQ(as_typed.outputs(0).name(), "profile");
  EXPECT_EQ(as_typed.outputs(0).contents().fp64_contents(0), 0.25);
  EXPECT_EQ(as_typed.outputs(1).contents().fp32_contents_size(), 4);
  EXPECT_EQ(as_typed.outputs(1).contents().fp32_contents(3), 4.0f);
}

TEST(GrpcCodec, AnEmptyOutputIsRawToo) {
  const std::vector<double> profile = {0.25};
  runtime::Response response;
  response.outputs = {{DType::kFloat32, {0, 2}, nullptr, nullptr, 0},
                      {DType::kFloat64, {1}, nullptr, profile.data(), sizeof(double)}};
  const auto request = raw();
  for (int i = 1; i < request->inputs_size(); ++i) {
    request->mutable_inputs(i)->set_shape(0, 0);
    request->mutable_raw_input_contents(i)->clear();
  }
  const ModelInferResponse message = encode(decode_infer(manifest(), request), response);
  EXPECT_EQ(message.outputs(0).shape(0), 0);
  ASSERT_EQ(message.raw_output_contents_size(), 2);
  EXPECT_EQ(message.raw_output_contents(0), "");
  EXPECT_EQ(message.raw_output_contents(1), bytes_of(profile));
}

}  // namespace
}  // namespace ikbo::server
