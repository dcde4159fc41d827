// SPDX-License-Identifier: Apache-2.0
// Certificates of the server, one set for both protocols.
#pragma once

#include <string>

namespace ikbo::server {

// Paths of PEM files. Empty certificate: no TLS.
struct TlsOptions {
  std::string certificate;  // with the chain up to the authority, the server's own first
  std::string key;          // of the certificate, unencrypted
  std::string client_ca;    // clients must show a certificate that one of these has signed

  bool is_enabled() const { return !certificate.empty(); }
};

struct TlsFiles {
  std::string certificate;
  std::string key;
  std::string client_ca;
};

// The contents of the files; throws ikbo::Error for one that cannot be read or is empty.
TlsFiles read_tls_files(const TlsOptions& options);

}  // namespace ikbo::server
