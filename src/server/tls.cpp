// SPDX-License-Identifier: Apache-2.0
#include "server/tls.h"

#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>

#include "ikbo/error.h"

namespace ikbo::server {
namespace {

std::string read_file(std::string_view flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  IKBO_CHECK(!file.bad() && !text.empty(), flag, ": must be a readable PEM file; got ", path);
  return text;
}

}  // namespace

TlsFiles read_tls_files(const TlsOptions& options) {
  TlsFiles files;
  files.certificate = read_file("--tls-cert", options.certificate);
  files.key = read_file("--tls-key", options.key);
  if (!options.client_ca.empty()) {
    files.client_ca = read_file("--tls-client-ca", options.client_ca);
  }
  return files;
}

bool is_certificate_current(const TlsFiles& files) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> text(
      BIO_new_mem_buf(files.certificate.data(), static_cast<int>(files.certificate.size())),
      BIO_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr), X509_free);
  return certificate != nullptr &&
         X509_cmp_current_time(X509_get0_notBefore(certificate.get())) < 0 &&
         X509_cmp_current_time(X509_get0_notAfter(certificate.get())) > 0;
}

}  // namespace ikbo::server
