// SPDX-License-Identifier: Apache-2.0
// What the runtime uses of OpenSSL's libcrypto.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct evp_md_ctx_st;

namespace ikbo::runtime {

// SHA-256 of bytes that come in pieces.
class Sha256 {
 public:
  Sha256();

  void update(std::span<const std::byte> bytes);
  // 64 hexadecimal digits in lower case; ends the digest.
  std::string finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// Throws ikbo::Error, which names the file, for a path that holds no Ed25519 public key in PEM.
void check_public_keys(const std::vector<std::string>& key_files);

// Whether one of the keys made the Ed25519 signature of `bytes`. Throws as check_public_keys.
bool is_signed_by_any(const std::vector<std::string>& key_files, std::span<const std::byte> bytes,
                      std::span<const std::byte> signature);

}  // namespace ikbo::runtime
