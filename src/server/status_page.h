// SPDX-License-Identifier: Apache-2.0
// The page at /status: status_page.html, compiled in.
#pragma once

#include <string_view>

namespace ikbo::server {

extern const std::string_view kStatusPage;
// What the page may do: run its own script, and ask this server.
inline constexpr std::string_view kStatusPagePolicy =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'";

}  // namespace ikbo::server
