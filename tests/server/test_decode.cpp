// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>

#include "fixtures.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

using testing::body_of;
using testing::bytes_of;
using testing::error_of;
using testing::expect_contains;
using testing::manifest;
using testing::replaced;
using testing::valid_json;
using testing::values_of;

InferCall decode(const std::string& json, const std::string& binary = "") {
  return decode_infer(manifest(), body_of(json, binary));
}

template <typename T>
std::vector<T> input_values(const InferCall& call, std::size_t i) {
  return values_of<T>(call.request.tensors[i].data, call.request.tensors[i].bytes);
}

// A refusal names the model and contains `part`.
void expect_refused(const std::string& json, const std::string& part,
                    const std::string& binary = "") {
  const RequestError error = error_of([&] { decode(json, binary); });
  EXPECT_EQ(error.kind(), ErrorKind::kBadRequest);
  expect_contains(error.what(), "model m: ");
  expect_contains(error.what(), part);
}

constexpr char kBinaryJson[] =
    R"({"id": "r1", "parameters": {"binary_data_output": true}, "inputs": [
  {"name": "is_new", "datatype": "BOOL", "shape": [3], "parameters": {"binary_data_size": 3}},
  {"name": "x_cand", "datatype": "FP32", "shape": [3, 3], "parameters": {"binary_data_size": 36}},
  {"name": "cand_to_user", "datatype": "INT32", "shape": [3], "data": [1, 0, 1]},
  {"name": "x_user", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
  {"name": "count", "datatype": "INT64", "shape": [3], "parameters": {"binary_data_size": 24}}]})";

std::string binary_data() {
  return bytes_of<char>({1, 0, 1}) + bytes_of<float>({1, 2, 3, 4, 5, 6, 7, 8, 9}) +
         bytes_of<float>({0.5, 1.5, 2.5, 3.5}) + bytes_of<std::int64_t>({1, -2, 3});
}

TEST(Decode, ReadsJsonTensorsInTheManifestsOrder) {
  const InferCall call = decode(valid_json());
  EXPECT_EQ(call.request.num_users, 1);
  EXPECT_EQ(call.request.num_candidates, 2);
  EXPECT_EQ(input_values<float>(call, 0), (std::vector<float>{0.5, 2}));
  EXPECT_EQ(input_values<float>(call, 1), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(input_values<std::int64_t>(call, 2), (std::vector<std::int64_t>{7, -8}));
  EXPECT_EQ(input_values<char>(call, 3), (std::vector<char>{1, 0}));
  EXPECT_TRUE(call.request.tensors[4].is_absent());
  EXPECT_EQ(call.id, "");
  ASSERT_EQ(call.outputs.size(), 2u);
  EXPECT_FALSE(call.outputs[0].is_binary);
}

TEST(Decode, ReadsNestedData) {
  const InferCall call =
      decode(replaced(valid_json(), "[1, 2, 3, 4, 5, 6]", "[[1, 2, 3], [4, 5, 6]]"));
  EXPECT_EQ(input_values<float>(call, 1), (std::vector<float>{1, 2, 3, 4, 5, 6}));
}

TEST(Decode, ReadsBinaryTensorsInTheRequestsOrder) {
  const InferCall call = decode(kBinaryJson, binary_data());
  EXPECT_EQ(call.id, "r1");
  EXPECT_EQ(call.request.num_users, 2);
  EXPECT_EQ(call.request.num_candidates, 3);
  EXPECT_EQ(input_values<float>(call, 0), (std::vector<float>{0.5, 1.5, 2.5, 3.5}));
  EXPECT_EQ(input_values<float>(call, 1), (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(input_values<std::int64_t>(call, 2), (std::vector<std::int64_t>{1, -2, 3}));
  EXPECT_EQ(input_values<char>(call, 3), (std::vector<char>{1, 0, 1}));
  EXPECT_EQ(input_values<std::int32_t>(call, 4), (std::vector<std::int32_t>{1, 0, 1}));
  ASSERT_EQ(call.outputs.size(), 2u);
  EXPECT_TRUE(call.outputs[1].is_binary);
}

TEST(Decode, BinaryTensorsAreUsedWhereTheyWereReceived) {
  // The JSON's length must not decide the alignment of what follows it.
  for (int padding = 0; padding < 70; ++padding) {
    const std::string json = kBinaryJson + std::string(padding, ' ');
    const auto body = body_of(json, binary_data());
    const InferCall call = decode_infer(manifest(), body);
    const auto* first = static_cast<const std::byte*>(call.request.tensors[3].data);
    EXPECT_EQ(first, body->binary().data());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % kBufferAlignment, 0u);
    EXPECT_EQ(call.request.tensors[1].data, first + 3);
  }
}

TEST(Decode, KeepsTheBodyAlive) {
  InferCall call = decode(kBinaryJson, binary_data());
  const runtime::Request request = std::move(call.request);
  call = {};
  EXPECT_EQ(values_of<float>(request.tensors[0].data, request.tensors[0].bytes),
            (std::vector<float>{0.5, 1.5, 2.5, 3.5}));
}

TEST(Decode, ReadsWantedOutputs) {
  const InferCall call =
      decode(replaced(valid_json(), R"({"inputs")",
                      R"({"parameters": {"binary_data_output": true}, "outputs": [
                   {"name": "profile", "parameters": {"binary_data": false}},
                   {"name": "score"}], "inputs")"));
  ASSERT_EQ(call.outputs.size(), 2u);
  EXPECT_EQ(call.outputs[0].index, 1u);
  EXPECT_FALSE(call.outputs[0].is_binary);
  EXPECT_EQ(call.outputs[1].index, 0u);
  EXPECT_TRUE(call.outputs[1].is_binary);
}

TEST(Decode, ReadsAModelWithoutUsers) {
  const InferCall call =
      decode_infer(testing::plain_manifest(),
                   body_of(R"({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2],
                              "data": [1, 2, 3, 4]}]})"));
  EXPECT_EQ(call.request.num_users, 0);
  EXPECT_EQ(call.request.num_candidates, 2);
}

TEST(Decode, ReadsARequestWithoutCandidates) {
  std::string json =
      replaced(valid_json(), "[2, 3], \"data\": [1, 2, 3, 4, 5, 6]", "[0, 3], \"data\": []");
  json = replaced(json, "[2], \"data\": [7, -8]", "[0], \"data\": []");
  json = replaced(json, "[2], \"data\": [true, false]", "[0], \"data\": []");
  EXPECT_EQ(decode(json).request.num_candidates, 0);
}

TEST(Decode, RefusesWhatIsNotTheProtocol) {
  expect_refused("", "well formed");
  expect_refused("{\"inputs\": [", "well formed");
  expect_refused(valid_json() + "x", "well formed");
  expect_refused("{\"inputs\": [\"\xff\"]}", "well formed");
  expect_refused("[]", "must be a JSON object; got an array");
  expect_refused("{}", "must have an array 'inputs'");
  expect_refused(R"({"inputs": {}})", "'inputs' must be an array; got an object");
  expect_refused(R"({"inputs": [3]})", "each input must be an object; got 3");
  expect_refused(R"({"inputs": [{}]})", "each input must have a string 'name'");
  expect_refused(replaced(valid_json(), R"({"inputs")", R"({"id": 5, "inputs")"),
                 "'id' must be a string; got 5");
  expect_refused(std::string(2000, '[') + std::string(2000, ']'), "well formed");
}

TEST(Decode, RefusesWrongSetsOfInputs) {
  expect_refused(replaced(valid_json(), "\"count\"", "\"cuont\""),
                 "input cuont is unknown; it must be one of x_user, x_cand, count");
  expect_refused(replaced(valid_json(), "\"count\"", "\"x_cand\""),
                 "input x_cand must be given once");
  expect_refused(R"({"inputs": []})", "input x_user is missing (FP32 [-1, 2])");
  expect_refused(
      replaced(valid_json(), "[1, 2], \"data\": [0.5, 2]", "[2, 2], \"data\": [0.5, 2, 1, 1]"),
      "input cand_to_user is missing; it may be left out only when there is one user, "
      "got 2");
}

TEST(Decode, RefusesWrongDtypesAndShapes) {
  const std::string user = "\"FP32\", \"shape\": [1, 2]";
  expect_refused(replaced(valid_json(), user, "\"FP64\", \"shape\": [1, 2]"),
                 "input x_user must have datatype FP32; got FP64");
  expect_refused(replaced(valid_json(), user, "\"BYTES\", \"shape\": [1, 2]"),
                 "BYTES tensors are not supported");
  expect_refused(replaced(valid_json(), user, "\"UINT32\", \"shape\": [1, 2]"), "got UINT32");
  expect_refused(replaced(valid_json(), user, "3, \"shape\": [1, 2]"),
                 "must have a string 'datatype'");
  expect_refused(replaced(valid_json(), user, "\"FP32\", \"shape\": [2]"),
                 "input x_user must have shape [-1, 2]; got [2]");
  expect_refused(replaced(valid_json(), user, "\"FP32\", \"shape\": [2, 1]"), "got [2, 1]");
  expect_refused(replaced(valid_json(), user, "\"FP32\", \"shape\": [1, -2]"),
                 "extents of shape must be integers from 0 on; got -2");
  expect_refused(replaced(valid_json(), user, "\"FP32\""), "must have an array 'shape'");
  expect_refused(replaced(valid_json(), user, "\"FP32\", \"shape\": [9223372036854775807, 2]"),
                 "fewer than 2^64 bytes");
  expect_refused(replaced(valid_json(), user, "\"FP32\", \"shape\": [1000000000, 2]"),
                 "must have as many values as its shape");
  expect_refused(replaced(valid_json(), "[2], \"data\": [7, -8]", "[1], \"data\": [7]"), "count");
}

TEST(Decode, RefusesWrongJsonData) {
  const std::string user = "[0.5, 2]";
  expect_refused(replaced(valid_json(), user, "[0.5]"), "must have 2 values");
  expect_refused(replaced(valid_json(), user, "[0.5, 2, 3]"), "must have 2 values");
  expect_refused(replaced(valid_json(), user, "[[0.5, 2], [1, 2]]"), "1 rows in dimension 0");
  expect_refused(replaced(valid_json(), user, "[[0.5], [2]]"), "must have 2 values");
  expect_refused(replaced(valid_json(), user, "[0.5, [2]]"),
                 "input x_user: element 1 must be a value of FP32; got an array");
  expect_refused(replaced(valid_json(), user, "[0.5, \"2\"]"), "got \"2\"");
  expect_refused(replaced(valid_json(), user, "[0.5, 1e39]"), "element 1 must be a value of FP32");
  expect_refused(replaced(valid_json(), user, "7"), "'data' must be an array; got 7");
  expect_refused(replaced(valid_json(), "[7, -8]", "[7, 1.5]"),
                 "input count: element 1 must be a value of INT64; got 1.5");
  expect_refused(replaced(valid_json(), "[7, -8]", "[7, 9223372036854775808]"),
                 "got 9223372036854775808");
  expect_refused(replaced(valid_json(), "[true, false]", "[true, 0]"),
                 "element 1 must be a value of BOOL; got 0");
}

TEST(Decode, RefusesNumbersOutOfASmallTypesRange) {
  runtime::Manifest small = manifest();
  small.inputs[2].dtype = DType::kInt8;
  const std::string json = replaced(valid_json(), "INT64", "INT8");
  EXPECT_NO_THROW(decode_infer(small, body_of(replaced(json, "[7, -8]", "[127, -128]"))));
  const RequestError error =
      error_of([&] { decode_infer(small, body_of(replaced(json, "[7, -8]", "[7, 128]"))); });
  expect_contains(error.what(), "element 1 must be a value of INT8; got 128");
}

TEST(Decode, RefusesWrongBinaryData) {
  const std::string json = kBinaryJson;
  const std::string data = binary_data();
  expect_refused(replaced(json, ": 36", ": 35"), "must have binary_data_size 36", data);
  expect_refused(replaced(json, ": 36", ": -36"), "got -36", data);
  expect_refused(json, "needs 24 bytes of binary data; the body has 23",
                 data.substr(0, data.size() - 1));
  expect_refused(json, "3 bytes are left over", data + "abc");
  expect_refused(valid_json(), "4 bytes are left over", "abcd");
  expect_refused(replaced(json, "\"parameters\": {\"binary_data_size\": 16}", "\"parameters\": {}"),
                 "input x_user must have either 'data' or the parameter 'binary_data_size'; got "
                 "neither",
                 data);
  expect_refused(replaced(json, "\"data\": [1, 0, 1]",
                          "\"data\": [1, 0, 1], \"parameters\": {\"binary_data_size\": 12}"),
                 "got both", data);
  expect_refused(json, "input is_new", bytes_of<char>({1, 2, 1}) + data.substr(3));
}

TEST(Decode, SixteenBitFloatsTravelAsBinaryData) {
  runtime::Manifest half = manifest();
  half.inputs[0].dtype = DType::kBFloat16;
  half.outputs[0].dtype = DType::kFloat16;
  std::string json =
      replaced(valid_json(), "\"FP32\", \"shape\": [1, 2]", "\"BF16\", \"shape\": [1, 2]");
  const std::string wants_profile = R"({"outputs": [{"name": "profile"}], "inputs")";
  RequestError error =
      error_of([&] { decode_infer(half, body_of(replaced(json, R"({"inputs")", wants_profile))); });
  expect_contains(error.what(), "input x_user has datatype BF16, which must be sent as binary");
  json = replaced(json, "\"data\": [0.5, 2]", "\"parameters\": {\"binary_data_size\": 4}");
  error = error_of([&] { decode_infer(half, body_of(json, "abcd")); });
  expect_contains(error.what(), "output score has datatype FP16");
  const InferCall call =
      decode_infer(half, body_of(replaced(json, R"({"inputs")", wants_profile), "abcd"));
  EXPECT_EQ(input_values<char>(call, 0), (std::vector<char>{'a', 'b', 'c', 'd'}));
}

TEST(Decode, RefusesWhatItCannotHonour) {
  expect_refused(replaced(valid_json(), R"({"inputs")", R"({"outputs": [{"name": "x"}], "inputs")"),
                 "output x is unknown; it must be one of score, profile");
  expect_refused(replaced(valid_json(), R"({"inputs")",
                          R"({"outputs": [{"name": "score"}, {"name": "score"}], "inputs")"),
                 "output score must be asked for once");
  expect_refused(replaced(valid_json(), R"({"inputs")",
                          R"({"outputs": [{"name": "score", "parameters":
                              {"classification": 3}}], "inputs")"),
                 "'classification' is not supported");
  expect_refused(replaced(valid_json(), "\"data\": [0.5, 2]",
                          "\"parameters\": {\"shared_memory_region\": \"r\"}"),
                 "'shared_memory_region' is not supported");
  expect_refused(replaced(valid_json(), R"({"inputs")",
                          R"({"parameters": {"binary_data_output": 1}, "inputs")"),
                 "'binary_data_output' must be true or false; got 1");
}

TEST(Decode, RefusesIndicesOutOfRangeAndLeavesSizesToTheBatcher) {
  std::string five_users = replaced(valid_json(), "[1, 2], \"data\": [0.5, 2]",
                                    "[5, 2], \"data\": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]");
  five_users = replaced(five_users, "[true, false]}",
                        R"([true, false]}, {"name": "cand_to_user", "datatype": "INT32",
                           "shape": [2], "data": [0, 1]})");
  EXPECT_EQ(decode(five_users).request.num_users, 5);
  for (const char* index : {"-1", "1"}) {
    const std::string json =
        replaced(valid_json(), "[true, false]}",
                 std::string(R"([true, false]}, {"name": "cand_to_user", "datatype": "INT32",
                       "shape": [2], "data": [0, )") +
                     index + "]}");
    expect_refused(json, std::string("got ") + index + " at position 1");
  }
}

TEST(Decode, ErrorsDoNotShowSourcePositions) {
  const RequestError error = error_of(
      [&] { decode(replaced(valid_json(), "[2], \"data\": [7, -8]", "[1], \"data\": [7]")); });
  EXPECT_EQ(std::string(error.what()).find(".cpp"), std::string::npos) << error.what();
}

TEST(Decode, ReadsTheUserKey) {
  const auto with = [](const std::string& value) {
    return replaced(valid_json(), "{\"inputs\"",
                    "{\"parameters\": {\"user_key\": " + value + "}, \"inputs\"");
  };
  EXPECT_EQ(decode(valid_json()).request.user_key, "");
  EXPECT_EQ(decode(with("\"ann\"")).request.user_key, "ann");
  EXPECT_EQ(decode(with("\"\"")).request.user_key, "");
  expect_refused(with("7"), "parameter 'user_key' must be a string; got 7");
  expect_refused(with('"' + std::string(257, 'x') + '"'), "must have at most 256 bytes; got 257");
}

TEST(Decode, ReadsTheTimeout) {
  const auto with = [](const std::string& value) {
    return replaced(valid_json(), "{\"inputs\"",
                    "{\"parameters\": {\"timeout\": " + value + "}, \"inputs\"");
  };
  EXPECT_EQ(decode(valid_json()).timeout, std::nullopt);
  EXPECT_EQ(decode(with("0")).timeout, std::nullopt);
  EXPECT_EQ(decode(with("1500")).timeout, std::chrono::microseconds(1500));
  EXPECT_EQ(decode(with("9223372036854775807")).timeout, std::chrono::hours(24));
  for (const char* value : {"-1", "1.5", "\"1\"", "null"}) {
    expect_refused(with(value), std::string("number of microseconds from 0 on; got ") + value);
  }
}

}  // namespace
}  // namespace ikbo::server
