// SPDX-License-Identifier: Apache-2.0
// A small model and request bodies for it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/manifest.h"
#include "server/request_body.h"
#include "server/request_error.h"

namespace ikbo::server::testing {

// Inputs x_user [U, 2] float32, x_cand [B, 3] float32, count [B] int64, is_new [B] bool and
// cand_to_user; outputs score [B, 2] float32 and profile [U] float64. At most 4 users and 16
// candidates. Name "m", version "7".
runtime::Manifest manifest();
// One candidate input x [B, 2] and one output y [B], no users; at most 8 candidates. Name "plain".
runtime::Manifest plain_manifest();

// A body of `json`, then `binary` behind it.
std::shared_ptr<const RequestBody> body_of(std::string_view json, std::string_view binary = "");

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> values_of(const void* data, std::size_t bytes) {
  std::vector<T> values(bytes / sizeof(T));
  if (bytes > 0) {
    std::memcpy(values.data(), data, bytes);
  }
  return values;
}

// JSON of a valid request to manifest() with one user and two candidates, without cand_to_user.
std::string valid_json();

// A valid request to manifest(); its numbers follow from `seed`.
runtime::Request make_request(std::int64_t num_users, std::int64_t num_candidates, int seed);

// The RequestError that `call` throws; the test fails when it throws none.
template <typename Call>
RequestError error_of(const Call& call) {
  try {
    call();
  } catch (const RequestError& error) {
    return error;
  }
  ADD_FAILURE() << "expected a RequestError";
  return RequestError(ErrorKind::kBadRequest, "");
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "text: " << text << "\npart: " << part;
}

// `text` with its one occurrence of `from` replaced; the test fails when there is not exactly one.
std::string replaced(const std::string& text, const std::string& from, const std::string& to);

}  // namespace ikbo::server::testing
