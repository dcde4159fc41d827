// SPDX-License-Identifier: Apache-2.0
#include "fixtures.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace ikbo::server::testing {

using runtime::Role;

namespace {

runtime::TensorSpec spec(std::string name, DType dtype, runtime::Shape shape, Role role) {
  return {.name = std::move(name),
          .dtype = dtype,
          .shape = std::move(shape),
          .role = role,
          .values = std::nullopt};
}

}  // namespace

runtime::Manifest manifest() {
  runtime::Manifest manifest;
  manifest.model_name = std::string("m");
  manifest.model_version = std::string("7");
  manifest.device = "cpu";
  manifest.inputs = {spec("x_user", DType::kFloat32, {-1, 2}, Role::kUser),
                     spec("x_cand", DType::kFloat32, {-1, 3}, Role::kCandidate),
                     spec("count", DType::kInt64, {-1}, Role::kCandidate),
                     spec("is_new", DType::kBool, {-1}, Role::kCandidate),
                     spec("cand_to_user", DType::kInt32, {-1}, Role::kIndex)};
  manifest.outputs = {spec("score", DType::kFloat32, {-1, 2}, Role::kCandidate),
                      spec("profile", DType::kFloat64, {-1}, Role::kUser)};
  manifest.max_users = 4;
  manifest.max_candidates = 16;
  return manifest;
}

runtime::Manifest plain_manifest() {
  runtime::Manifest manifest;
  manifest.model_name = "plain";
  manifest.model_version = std::string("1");
  manifest.device = "cpu";
  manifest.inputs = {spec("x", DType::kFloat32, {-1, 2}, Role::kCandidate)};
  manifest.outputs = {spec("y", DType::kFloat32, {-1}, Role::kCandidate)};
  manifest.max_candidates = 8;
  return manifest;
}

std::shared_ptr<const RequestBody> body_of(std::string_view json, std::string_view binary) {
  auto body = std::make_shared<RequestBody>(json.size() + binary.size(), json.size());
  auto out = body->bytes().begin();
  for (const std::string_view part : {json, binary}) {
    out = std::transform(part.begin(), part.end(), out, [](char c) { return std::byte(c); });
  }
  return body;
}

std::string valid_json() {
  return R"({"inputs": [
    {"name": "x_user", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 2]},
    {"name": "x_cand", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]},
    {"name": "count", "datatype": "INT64", "shape": [2], "data": [7, -8]},
    {"name": "is_new", "datatype": "BOOL", "shape": [2], "data": [true, false]}]})";
}

runtime::Request make_request(std::int64_t num_users, std::int64_t num_candidates, int seed) {
  struct Storage {
    std::vector<float> x_user;
    std::vector<float> x_cand;
    std::vector<std::int64_t> count;
    std::vector<char> is_new;
    std::vector<std::int32_t> cand_to_user;
  };
  auto storage = std::make_shared<Storage>();
  unsigned state = static_cast<unsigned>(seed) * 2654435761u + 1;
  const auto next = [&state] { return (state = state * 1664525u + 1013904223u) >> 16; };
  for (std::int64_t i = 0; i < num_users * 2; ++i) {
    storage->x_user.push_back(static_cast<float>(next()) / 1024);
  }
  for (std::int64_t b = 0; b < num_candidates; ++b) {
    for (int k = 0; k < 3; ++k) {
      storage->x_cand.push_back(static_cast<float>(next()) / 4096);
    }
    storage->count.push_back(next() % 100);
    storage->is_new.push_back(static_cast<char>(next() % 2));
    storage->cand_to_user.push_back(static_cast<std::int32_t>(next() % num_users));
  }
  const auto view = [](DType dtype, runtime::Shape shape, const auto& values) {
    return runtime::TensorView{dtype, std::move(shape), values.data(),
                               values.size() * sizeof(values[0])};
  };
  runtime::Request request;
  request.num_users = num_users;
  request.num_candidates = num_candidates;
  request.tensors = {view(DType::kFloat32, {num_users, 2}, storage->x_user),
                     view(DType::kFloat32, {num_candidates, 3}, storage->x_cand),
                     view(DType::kInt64, {num_candidates}, storage->count),
                     view(DType::kBool, {num_candidates}, storage->is_new),
                     view(DType::kInt32, {num_candidates}, storage->cand_to_user)};
  request.owner = storage;
  return request;
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  EXPECT_EQ(text.find(from, at + 1), std::string::npos) << from;
  std::string result = text;
  if (at != std::string::npos) {
    result.replace(at, from.size(), to);
  }
  return result;
}

}  // namespace ikbo::server::testing
