// SPDX-License-Identifier: Apache-2.0
#include "server/access.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <fstream>

#include "ikbo/error.h"
#include "server/request_error.h"

namespace ikbo::server {
namespace {

constexpr std::string_view kScheme = "bearer ";
// A shorter one could be guessed.
constexpr std::size_t kMinTokenLength = 16;

std::array<unsigned char, 32> digest_of(std::string_view token) {
  std::array<unsigned char, 32> digest{};
  IKBO_CHECK(
      EVP_Digest(token.data(), token.size(), digest.data(), nullptr, EVP_sha256(), nullptr) == 1,
      "OpenSSL's SHA-256 failed");
  return digest;
}

bool is_visible(char c) { return c > ' ' && c <= '~'; }

// What follows "Bearer ", in upper or lower case; empty when it is something else.
std::string_view token_of(std::string_view authorization) {
  const std::string_view scheme = authorization.substr(0, kScheme.size());
  const bool is_bearer =
      std::equal(scheme.begin(), scheme.end(), kScheme.begin(), kScheme.end(),
                 [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
  return is_bearer ? authorization.substr(kScheme.size()) : "";
}

}  // namespace

AccessTokens::AccessTokens(const AccessOptions& options)
    : infer_(read("--infer-token-file", options.infer_tokens)),
      admin_(read("--admin-token-file", options.admin_tokens)) {}

std::vector<AccessTokens::Digest> AccessTokens::read(std::string_view flag,
                                                     const std::string& path) {
  std::vector<Digest> digests;
  if (path.empty()) {
    return digests;
  }
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (line.empty() || line.front() == '#') {
      continue;
    }
    IKBO_CHECK(line.size() >= kMinTokenLength && std::all_of(line.begin(), line.end(), is_visible),
               flag, ": a token must have at least ", kMinTokenLength,
               " visible ASCII characters and no space; that of line ", number, " of ", path,
               " has not");
    digests.push_back(digest_of(line));
  }
  IKBO_CHECK(!digests.empty(), flag, ": must be a readable file with one token a line; got ", path);
  return digests;
}

void AccessTokens::check(Access needed, std::string_view authorization) const {
  const std::vector<Digest>& accepted = needed == Access::kAdmin ? admin_ : infer_;
  if (needed == Access::kOpen || accepted.empty()) {
    return;
  }
  const Digest shown = digest_of(token_of(authorization));
  bool is_accepted = false;
  for (const Digest& digest : accepted) {
    is_accepted |= CRYPTO_memcmp(shown.data(), digest.data(), digest.size()) == 0;
  }
  if (!is_accepted) {
    refuse(ErrorKind::kUnauthenticated, "the request must have a header 'Authorization: Bearer ",
           needed == Access::kAdmin ? "<admin token>" : "<inference token>",
           authorization.empty() ? "'; it has none" : "'; its token is not accepted");
  }
}

}  // namespace ikbo::server
