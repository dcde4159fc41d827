// SPDX-License-Identifier: Apache-2.0
// A small manifest, packages around it, and tensors that fit it.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/model.h"

namespace ikbo::runtime::testing {

// Inputs age [U, 1] int64 in [0, 120], history [U, 3] float32, is_new [B] bool, item [B, 2] float32
// and cand_to_user; outputs score [B, 2] float32 and profile [U, 2] float64. At most 4 users and 16
// candidates, no operators, no replay cases.
std::string manifest_json();
Manifest manifest();

// `text` with its one occurrence of `from` replaced; the test fails when there is not exactly one.
std::string replaced(const std::string& text, const std::string& from, const std::string& to);

// Zip archive bytes holding these entries.
std::vector<std::byte> archive_bytes(const std::map<std::string, std::string>& entries);

// A folder of this test's own, removed at the end.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  // Writes a file and returns its path.
  std::string write(const std::string& name, const std::vector<std::byte>& bytes) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Tensor storage with a Request's life: what `owner` keeps.
using Buffers = std::vector<std::vector<std::byte>>;

// A valid request whose numbers follow from `seed`. The index spreads the candidates over the users
// in no order.
Request make_request(std::int64_t num_users, std::int64_t num_candidates, int seed);

// Positions in manifest(): of the inputs, then of the outputs.
inline constexpr std::size_t kAge = 0;
inline constexpr std::size_t kHistory = 1;
inline constexpr std::size_t kIsNew = 2;
inline constexpr std::size_t kItem = 3;
inline constexpr std::size_t kIndex = 4;
inline constexpr std::size_t kScore = 0;
inline constexpr std::size_t kProfile = 1;

template <typename T>
TensorView view_of(DType dtype, Shape shape, const std::vector<T>& values) {
  return {dtype, std::move(shape), values.data(), values.size() * sizeof(T)};
}

template <typename T>
std::vector<T> values_of(const Tensor& tensor) {
  std::vector<T> values(tensor.bytes / sizeof(T));
  if (tensor.bytes > 0) {
    std::memcpy(values.data(), tensor.data, tensor.bytes);
  }
  return values;
}

template <typename T>
std::vector<T> values_of(const TensorView& view) {
  return values_of<T>(Tensor{view.dtype, view.shape, nullptr, view.data, view.bytes});
}

// The text of the ikbo::Error that `call` throws; the test fails when it throws none.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an ikbo::Error";
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "text: " << text << "\npart: " << part;
}

}  // namespace ikbo::runtime::testing
