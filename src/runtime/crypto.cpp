// SPDX-License-Identifier: Apache-2.0
#include "runtime/crypto.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
struct FreeBio {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
using Key = std::unique_ptr<EVP_PKEY, FreeKey>;

const unsigned char* data_of(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

Key read_public_key(const std::string& path) {
  const std::unique_ptr<BIO, FreeBio> file(BIO_new_file(path.c_str(), "r"));
  const auto next_key = [&] {
    return Key(file == nullptr ? nullptr
                               : PEM_read_bio_PUBKEY(file.get(), nullptr, nullptr, nullptr));
  };
  Key key = next_key();
  const Key second = next_key();
  ERR_clear_error();
  IKBO_CHECK(file != nullptr, path,
             ": a trusted key must be a readable PEM file; this one cannot be opened");
  IKBO_CHECK(key != nullptr && EVP_PKEY_id(key.get()) == EVP_PKEY_ED25519, path,
             ": a trusted key must be a readable PEM file with an Ed25519 public key; it holds ",
             key == nullptr ? "no public key" : "one of another kind");
  IKBO_CHECK(
      second == nullptr, path,
      ": a trusted key must be alone in its file; this one holds several: one file for each");
  return key;
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  IKBO_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1,
             "OpenSSL must have SHA-256; it does not");
}

void Sha256::update(std::span<const std::byte> bytes) {
  IKBO_CHECK(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1,
             "OpenSSL's SHA-256 failed");
}

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned size = 0;
  IKBO_CHECK(EVP_DigestFinal_ex(context_.get(), digest.data(), &size) == 1,
             "OpenSSL's SHA-256 failed");
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (unsigned i = 0; i < size; ++i) {
    text += kDigits[digest[i] >> 4];
    text += kDigits[digest[i] & 15];
  }
  return text;
}

void check_public_keys(const std::vector<std::string>& key_files) {
  for (const std::string& path : key_files) {
    read_public_key(path);
  }
}

bool is_signed_by_any(const std::vector<std::string>& key_files, std::span<const std::byte> bytes,
                      std::span<const std::byte> signature) {
  return std::any_of(key_files.begin(), key_files.end(), [&](const std::string& path) {
    const Key key = read_public_key(path);
    const std::unique_ptr<EVP_MD_CTX, FreeContext> context(EVP_MD_CTX_new());
    const bool is_signed =
        context != nullptr &&
        EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
        EVP_DigestVerify(context.get(), data_of(signature), signature.size(), data_of(bytes),
                         bytes.size()) == 1;
    ERR_clear_error();
    return is_signed;
  });
}

}  // namespace ikbo::runtime
