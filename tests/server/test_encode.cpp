// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fixtures.h"
#include "server/json_writer.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::manifest;

template <typename T>
runtime::Tensor tensor_of(DType dtype, runtime::Shape shape, std::vector<T> values) {
  const auto storage = std::make_shared<std::vector<T>>(std::move(values));
  return {dtype, std::move(shape), storage, storage->data(), storage->size() * sizeof(T)};
}

runtime::Response response_of(float last) {
  return {{tensor_of<float>(DType::kFloat32, {2, 2}, {1, 0.1f, -2.5f, last}),
           tensor_of<double>(DType::kFloat64, {1}, {0.1})}};
}

InferCall call_for(std::vector<WantedOutput> outputs) {
  InferCall call;
  call.id = "a\"b";
  call.outputs = std::move(outputs);
  return call;
}

TEST(Encode, WritesJsonOutputs) {
  const InferAnswer answer =
      encode_infer(manifest(), call_for({{1, false}, {0, false}}), response_of(1e30f));
  EXPECT_EQ(answer.json,
            R"({"model_name":"m","model_version":"7","id":"a\"b","outputs":[)"
            R"({"name":"profile","datatype":"FP64","shape":[1],"data":[0.1]},)"
            R"({"name":"score","datatype":"FP32","shape":[2,2],"data":[1,0.1,-2.5,1e+30]}]})");
  EXPECT_TRUE(answer.blobs.empty());
  EXPECT_FALSE(answer.has_binary);
}

TEST(Encode, LeavesBinaryOutputsWhereTheyAre) {
  const runtime::Response response = response_of(3);
  const InferAnswer answer = encode_infer(manifest(), call_for({{0, true}, {1, false}}), response);
  EXPECT_EQ(answer.json, R"({"model_name":"m","model_version":"7","id":"a\"b","outputs":[)"
                         R"({"name":"score","datatype":"FP32","shape":[2,2],)"
                         R"("parameters":{"binary_data_size":16}},)"
                         R"({"name":"profile","datatype":"FP64","shape":[1],"data":[0.1]}]})");
  ASSERT_EQ(answer.blobs.size(), 1u);
  EXPECT_EQ(answer.blobs[0].data, response.outputs[0].data);
  EXPECT_TRUE(answer.has_binary);
}

TEST(Encode, RefusesValuesThatJsonDoesNotHave) {
  for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const RequestError error =
        error_of([&] { encode_infer(manifest(), call_for({{0, false}}), response_of(value)); });
    expect_contains(error.what(), "model m: output score: element 3 is ");
    EXPECT_NO_THROW(encode_infer(manifest(), call_for({{0, true}}), response_of(value)));
  }
}

TEST(Encode, WritesMetadata) {
  EXPECT_EQ(encode_server_metadata("1.2", {"binary_tensor_data"}),
            R"({"name":"ikbo-server","version":"1.2","extensions":["binary_tensor_data"]})");
  EXPECT_EQ(encode_model_metadata(testing::plain_manifest(), {"1", "2"}),
            R"({"name":"plain","versions":["1","2"],"platform":"pytorch_aotinductor","inputs":[)"
            R"({"name":"x","datatype":"FP32","shape":[-1,2],"parameters":{"role":"candidate"}}],)"
            R"("outputs":[{"name":"y","datatype":"FP32","shape":[-1],)"
            R"("parameters":{"role":"candidate"}}],)"
            R"("parameters":{"max_users":0,"max_candidates":8}})");
}

TEST(JsonWriter, EscapesAndRepairsText) {
  std::string out;
  JsonWriter(out).string("a\"\\\n\x01 \xc3\xa9");
  EXPECT_EQ(out, "\"a\\\"\\\\\\u000a\\u0001 \xc3\xa9\"");
  out.clear();
  JsonWriter(out).string("a\xff z");
  EXPECT_EQ(out, "\"a? z\"");
}

TEST(WireNames, GoBothWays) {
  for (int i = 0; i <= static_cast<int>(DType::kFloat64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_of_wire_name(wire_name(dtype)), dtype);
  }
  EXPECT_EQ(dtype_of_wire_name("BYTES"), std::nullopt);
}

}  // namespace
}  // namespace ikbo::server
