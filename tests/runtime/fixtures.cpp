// SPDX-License-Identifier: Apache-2.0
#include "fixtures.h"

#include <zip.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace ikbo::runtime::testing {
namespace {

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

// Small whole numbers, so that float sums are exact.
template <typename T>
std::vector<T> numbers(std::int64_t count, int seed, int modulus) {
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<T>((i * 7 + seed * 13) % modulus));
  }
  return values;
}

}  // namespace

std::string manifest_json() {
  return R"({
    "format_version": 1,
    "model": {"name": "ranker", "version": "3"},
    "torch_version": "2.11.0+cpu",
    "device": "cpu",
    "inputs": [
      {"name": "age", "dtype": "int64", "shape": [-1, 1], "role": "user",
       "values": {"min": 0, "max": 120}},
      {"name": "history", "dtype": "float32", "shape": [-1, 3], "role": "user"},
      {"name": "is_new", "dtype": "bool", "shape": [-1], "role": "candidate"},
      {"name": "item", "dtype": "float32", "shape": [-1, 2], "role": "candidate"},
      {"name": "cand_to_user", "dtype": "int32", "shape": [-1], "role": "index"}
    ],
    "outputs": [
      {"name": "score", "dtype": "float32", "shape": [-1, 2], "role": "candidate"},
      {"name": "profile", "dtype": "float64", "shape": [-1, 2], "role": "user"}
    ],
    "max_users": 4,
    "max_candidates": 16,
    "ops": [],
    "replay": [],
    "spec": {"rows": [1, 2.5]}
  })";
}

Manifest manifest() { return parse_manifest(manifest_json(), "manifest"); }

std::string replaced(const std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == std::string::npos || text.find(from, at + 1) != std::string::npos) {
    ADD_FAILURE() << "must occur exactly once: " << from;
    return text;
  }
  return text.substr(0, at) + to + text.substr(at + from.size());
}

std::vector<std::byte> archive_bytes(const std::map<std::string, std::string>& entries) {
  const TempFolder folder;
  const std::string path = folder.write("archive.zip", {});
  int error = 0;
  zip_t* archive = zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &error);
  for (const auto& [name, content] : entries) {
    zip_source_t* source = zip_source_buffer(archive, content.data(), content.size(), 0);
    EXPECT_GE(zip_file_add(archive, name.c_str(), source, ZIP_FL_ENC_UTF_8), 0);
  }
  EXPECT_EQ(zip_close(archive), 0);
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return bytes_of(std::vector<char>(bytes.begin(), bytes.end()));
}

TempFolder::TempFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "ikbo_XXXXXX").string();
  const char* made = mkdtemp(pattern.data());
  EXPECT_NE(made, nullptr) << pattern;
  path_ = pattern;
}

TempFolder::~TempFolder() { std::filesystem::remove_all(path_); }

std::string TempFolder::write(const std::string& name, const std::vector<std::byte>& bytes) const {
  const std::string path = path_ + "/" + name;
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

Request make_request(std::int64_t num_users, std::int64_t num_candidates, int seed) {
  const auto buffers = std::make_shared<Buffers>();
  buffers->push_back(bytes_of(numbers<std::int64_t>(num_users, seed, 90)));
  buffers->push_back(bytes_of(numbers<float>(num_users * 3, seed + 1, 50)));
  buffers->push_back(bytes_of(numbers<std::uint8_t>(num_candidates, seed + 2, 2)));
  buffers->push_back(bytes_of(numbers<float>(num_candidates * 2, seed + 3, 30)));
  buffers->push_back(
      bytes_of(numbers<std::int32_t>(num_candidates, seed + 4, static_cast<int>(num_users))));

  Request request{num_users, num_candidates, {}, buffers};
  const Manifest shape_of = manifest();
  for (std::size_t i = 0; i < buffers->size(); ++i) {
    const TensorSpec& spec = shape_of.inputs[i];
    Shape shape = spec.shape;
    shape[0] = num_rows(spec.role, num_users, num_candidates);
    request.tensors.push_back({spec.dtype, shape, (*buffers)[i].data(), (*buffers)[i].size()});
  }
  return request;
}

}  // namespace ikbo::runtime::testing
