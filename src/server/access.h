// SPDX-License-Identifier: Apache-2.0
// Bearer tokens: who may ask this process for what.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ikbo::server {

enum class Access : std::int8_t {
  kOpen,   // health
  kInfer,  // inference, metadata, metrics
  kAdmin,  // loading and unloading models
};

// Paths of files with one token a line; blank lines and lines that begin with '#' do not count.
// Empty: nobody has to show a token.
struct AccessOptions {
  std::string infer_tokens;
  std::string admin_tokens;

  bool is_any() const { return !infer_tokens.empty() || !admin_tokens.empty(); }
};

// Immutable; every method may be called by any thread.
class AccessTokens {
 public:
  // Nobody has to show a token.
  AccessTokens() = default;
  // Throws ikbo::Error for a file that cannot be read, or holds no token or an unusable one.
  explicit AccessTokens(const AccessOptions& options);

  // Throws RequestError(kUnauthenticated) unless `authorization`, the value of that header, holds a
  // token for `needed`. How long it takes does not depend on the tokens.
  void check(Access needed, std::string_view authorization) const;

 private:
  using Digest = std::array<unsigned char, 32>;  // SHA-256: of one length, whatever the token's is

  static std::vector<Digest> read(std::string_view flag, const std::string& path);

  std::vector<Digest> infer_;
  std::vector<Digest> admin_;
};

}  // namespace ikbo::server
