// SPDX-License-Identifier: Apache-2.0
// A POST to another server: plain HTTP/1.1, one connection for each.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace ikbo::server {

struct HttpUrl {
  std::string host;  // of an IPv6 address, without its brackets
  std::string port = "80";
  std::string target = "/";

  // "host:port" as the Host header has it.
  std::string authority() const;
};

// Throws ikbo::Error unless `text` is http://host[:port][/path]; `what` is named as at fault.
HttpUrl parse_http_url(std::string_view text, std::string_view what);

struct PostResult {
  unsigned status = 0;  // 0: no reply
  std::string text;     // the reply's body, or what kept it away
};

// Blocks for `timeout` per step (connecting, sending, reading) at most; a name's look-up takes as
// long as the system's resolver does.
PostResult post_json(const HttpUrl& url, const std::string& body,
                     std::chrono::milliseconds timeout);

}  // namespace ikbo::server
