// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "fixtures.h"
#include "runtime/compiled_code.h"

namespace ikbo::runtime::testing {
namespace {

constexpr const char* kLibrary = "m/data/aotinductor/model/c.wrapper.so";
constexpr const char* kMetadata = "m/data/aotinductor/model/c.wrapper_metadata.json";
constexpr const char* kCalls = "m/data/aotinductor/model/c.wrapper.json";

using Entries = std::map<std::string, std::string>;

// Code that was compiled for manifest().
Entries code() {
  return {{kLibrary, "machine code"},
          {kMetadata,
           R"({"AOTI_DEVICE_KEY": "cpu", "ikbo.inputs":
             "int64 [-1, 1]\nfloat32 [-1, 3]\nbool [-1]\nfloat32 [-1, 2]\nint32 [-1]"})"}};
}

void check(const Entries& entries, const Manifest& checked = manifest()) {
  const std::vector<std::byte> bytes = archive_bytes(entries);
  check_compiled_code(*Archive::open_memory(bytes, "m.pt2"), {"model", checked});
}

std::string error_for(const Entries& entries, const Manifest& checked = manifest()) {
  return error_of([&] { check(entries, checked); });
}

TEST(CompiledCode, FitsItsManifest) { EXPECT_NO_THROW(check(code())); }

TEST(CompiledCode, MustBeThere) {
  Entries entries = code();
  entries.erase(kLibrary);
  entries["m/extra/other.so"] = "elsewhere";
  expect_contains(error_for(entries),
                  "m.pt2: holds no compiled code (data/aotinductor/model/*.so); package");
}

TEST(CompiledCode, MustSayWhatItWasCompiledFor) {
  Entries entries = code();
  entries.erase(kMetadata);
  expect_contains(error_for(entries), "m.pt2: holds no data/aotinductor/model/*.wrapper_metadata");
  entries[kMetadata] = "text";
  expect_contains(error_for(entries), "c.wrapper_metadata.json is not JSON");
  entries[kMetadata] = R"({"AOTI_DEVICE_KEY": "cpu"})";
  expect_contains(error_for(entries), "c.wrapper_metadata.json: ikbo.inputs is missing");
}

TEST(CompiledCode, MustBeForTheManifestsDevice) {
  Manifest other = manifest();
  other.device = "cuda";
  expect_contains(error_for(code(), other),
                  "m.pt2: device must be cpu, which the code was compiled for; the manifest says "
                  "cuda");
}

TEST(CompiledCode, MustHaveTheManifestsInputs) {
  Manifest other = manifest();
  other.inputs[kHistory].shape = {-1, 4};
  expect_contains(error_for(code(), other),
                  "m.pt2: input history must be float32 [-1, 3], as the code was compiled for; the "
                  "manifest says float32 [-1, 4]");
  other = manifest();
  other.inputs[kAge].dtype = DType::kInt32;
  expect_contains(error_for(code(), other),
                  "input age must be int64 [-1, 1], as the code was compiled for; the manifest "
                  "says int32 [-1, 1]");
  other = manifest();
  other.inputs.pop_back();
  expect_contains(error_for(code(), other),
                  "inputs must be 5, as many as the code was compiled "
                  "for; the manifest has 4");
}

TEST(CompiledCode, CallsOnlyOperatorsThatTheManifestLists) {
  Entries entries = code();
  entries[kCalls] = R"({"nodes": [{"name": "a", "node": {"target": "aten::mm"}},
                                  {"name": "b", "node": {"target": "ikbo::lce.list"}}]})";
  expect_contains(error_for(entries),
                  "m.pt2: the code calls ikbo::lce.list, which ops of the manifest must list");
  Manifest listing = manifest();
  listing.ops.push_back({"ikbo::lce.list", "schema"});
  EXPECT_NO_THROW(check(entries, listing));
}

}  // namespace
}  // namespace ikbo::runtime::testing
