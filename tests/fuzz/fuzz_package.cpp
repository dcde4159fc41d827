// SPDX-License-Identifier: Apache-2.0
// Fuzzes the package opener: whatever the bytes are, it must open them as a package whose manifest
// keeps its promises, or throw ikbo::Error. Bytes that begin with "{" are a manifest, others an
// archive (mutations of compressed bytes rarely reach the manifest parser).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "ikbo/error.h"
#include "ikbo/runtime/model.h"
#include "runtime/archive.h"

namespace {

using namespace ikbo::runtime;

constexpr std::size_t kMaxEntryBytes = std::size_t{1} << 20;

void demand(bool holds) {
  if (!holds) {
    std::abort();
  }
}

// What the rest of the runtime relies on without checking again.
void check_promises(const Manifest& manifest) {
  demand(!manifest.inputs.empty() && !manifest.outputs.empty());
  demand(manifest.max_users >= 0 && manifest.max_candidates >= 1);
  std::size_t indices = 0;
  for (const TensorSpec& spec : manifest.inputs) {
    demand(!spec.shape.empty() && spec.shape[0] == -1);
    const std::int64_t rows = num_rows(spec.role, manifest.max_users, manifest.max_candidates);
    std::size_t bytes = 0;
    demand(!__builtin_mul_overflow(static_cast<std::size_t>(rows), spec.row_bytes(), &bytes));
    indices += spec.role == Role::kIndex ? 1 : 0;
  }
  demand(indices == (manifest.has_users() ? 1 : 0));
  if (manifest.user_stage.has_value()) {
    std::size_t state_bytes = 0;
    for (const TensorSpec& spec : manifest.user_stage->state) {
      demand(spec.role == Role::kUser);
      demand(!__builtin_add_overflow(state_bytes, spec.row_bytes(), &state_bytes));
    }
    demand(manifest.has_users() && !manifest.user_stage->state.empty());
  }
  for (const FileDigest& file : manifest.files) {
    demand(!file.name.empty() && file.sha256.size() == 64);
  }
  for (const ReplayCase& replay : manifest.replay) {
    demand(replay.inputs.size() == manifest.inputs.size());
    demand(replay.outputs.size() == manifest.outputs.size());
  }
}

void open_archive(std::span<const std::byte> bytes) {
  const Package package = Package::from_archive(Archive::open_memory(bytes, "fuzz.pt2"));
  check_promises(package.manifest());
  for (const std::string& entry : package.archive().entries()) {
    demand(entry.front() != '/' && !entry.starts_with("../"));
  }
  for (const ReplayCase& replay : package.manifest().replay) {
    for (const std::string& entry : replay.inputs) {
      demand(package.read(entry, kMaxEntryBytes).size() <= kMaxEntryBytes);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    if (size > 0 && data[0] == '{') {
      check_promises(parse_manifest({reinterpret_cast<const char*>(data), size}, "fuzz.json"));
    } else {
      open_archive(std::as_bytes(std::span(data, size)));
    }
  } catch (const ikbo::Error&) {
    // The one exception that a caller has to expect.
  }
  return 0;
}
