// SPDX-License-Identifier: Apache-2.0
#include "server/tls.h"

#include <fstream>
#include <iterator>
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

}  // namespace ikbo::server
