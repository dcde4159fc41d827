// SPDX-License-Identifier: Apache-2.0
// Compression of HTTP bodies: gzip, and deflate in the zlib format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/http_message.h"
#include "server/request_body.h"

namespace ikbo::server {

enum class Coding : std::int8_t { kIdentity, kGzip, kDeflate };

// Whether `text` is that word, given in small letters, in letters of any size.
bool is_word(std::string_view text, std::string_view lower);

// Of a Content-Encoding field, empty where there is none; nothing for another coding.
std::optional<Coding> coding_of(std::string_view content_encoding);

// The coding that a client with this Accept-Encoding field wants most; kIdentity when it has no
// wish that can be met.
Coding wanted_coding(std::string_view accept_encoding);

// What `packed` holds. Throws RequestError for bytes that are not `coding`, for more than
// `max_bytes` of them once unpacked, and for fewer than `json_size` (none: all is JSON).
std::shared_ptr<RequestBody> unpack_body(const RequestBody& packed, Coding coding,
                                         std::optional<std::size_t> json_size,
                                         std::size_t max_bytes, MemoryBudget& memory);

// Replaces text and blobs by their coded bytes and names the coding in a header. Small replies stay
// as they are, and so do all when there is no memory to pack them.
void pack_reply(Coding coding, HttpReply& reply);

}  // namespace ikbo::server
