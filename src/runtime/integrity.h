// SPDX-License-Identifier: Apache-2.0
// Whether an archive holds what its manifest says, and who says so.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "ikbo/runtime/manifest.h"
#include "ikbo/runtime/model.h"
#include "runtime/archive.h"

namespace ikbo::runtime {

inline constexpr const char* kManifestName = "manifest.json";
// The manifest's signature, beside it.
inline constexpr const char* kSignatureName = "manifest.sig";

// Throws ikbo::Error unless one of the trusted keys, if there are any, has signed the manifest. To
// be called before the manifest is parsed.
void check_signature(const Archive& archive, const std::string& folder,
                     std::span<const std::byte> manifest, const PackageTrust& trust);

// Reads every entry; throws ikbo::Error naming the one that is damaged, absent, not listed, or not
// what its digest says. A manifest without digests is refused where `trust` wants them.
void check_files(const Archive& archive, const std::string& folder, const Manifest& manifest,
                 const PackageTrust& trust);

}  // namespace ikbo::runtime
