// SPDX-License-Identifier: Apache-2.0
#include "server/http_coding.h"

#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "server/request_error.h"

namespace ikbo::server {
namespace {

// A reply below this fits one packet: nothing is gained.
constexpr std::size_t kMinPackedBytes = 1024;
// Tensors hardly shrink, and a higher level takes several times as long.
constexpr int kLevel = 1;
constexpr std::size_t kFirstUnpacked = 64 * 1024;

// zlib's code for the format around the data, in the argument windowBits.
int window_bits(Coding coding) { return coding == Coding::kGzip ? MAX_WBITS + 16 : MAX_WBITS; }

std::string_view name_of(Coding coding) { return coding == Coding::kGzip ? "gzip" : "deflate"; }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) {
    text.remove_prefix(1);
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) {
    text.remove_suffix(1);
  }
  return text;
}

// The part of `text` before `separator`; `text` keeps what follows it.
std::string_view cut(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view part = trimmed(text.substr(0, end));
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return part;
}

// The weight of an element of Accept-Encoding, from 0 to 1; one that cannot be read is 0.
double weight_of(std::string_view parameters) {
  if (parameters.empty()) {
    return 1;
  }
  double weight = 0;
  if (parameters.starts_with("q=") || parameters.starts_with("Q=")) {
    std::from_chars(parameters.data() + 2, parameters.data() + parameters.size(), weight);
  }
  return weight;
}

// One call of zlib sees at most so many bytes: it counts them in 32 bits.
uInt step(std::size_t bytes) {
  return static_cast<uInt>(std::min<std::size_t>(bytes, std::numeric_limits<uInt>::max()));
}

struct Inflater {
  explicit Inflater(Coding coding) {
    if (inflateInit2(&stream, window_bits(coding)) != Z_OK) {
      throw std::bad_alloc();
    }
  }
  ~Inflater() { inflateEnd(&stream); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;
  z_stream stream{};
};

struct Deflater {
  explicit Deflater(Coding coding) {
    constexpr int kDefaultMemory = 8;
    if (deflateInit2(&stream, kLevel, Z_DEFLATED, window_bits(coding), kDefaultMemory,
                     Z_DEFAULT_STRATEGY) != Z_OK) {
      throw std::bad_alloc();
    }
  }
  ~Deflater() { deflateEnd(&stream); }
  Deflater(const Deflater&) = delete;
  Deflater& operator=(const Deflater&) = delete;
  z_stream stream{};
};

// zlib does not write through next_in, which has no const in its interface.
Bytef* input(const void* data) { return static_cast<Bytef*>(const_cast<void*>(data)); }

std::vector<std::byte> unpack(std::string_view packed, Coding coding, std::size_t max_bytes) {
  Inflater inflater(coding);
  z_stream& stream = inflater.stream;
  stream.next_in = input(packed.data());
  std::vector<std::byte> out(std::min(kFirstUnpacked, max_bytes + 1));
  std::size_t size = 0;
  std::size_t unread = packed.size();
  for (int status = Z_OK; status != Z_STREAM_END;) {
    if (size == out.size()) {
      out.resize(std::min(2 * size, max_bytes + 1));
    }
    const uInt given = step(unread);
    const uInt room = step(out.size() - size);
    stream.avail_in = given;
    stream.next_out = reinterpret_cast<Bytef*>(out.data()) + size;
    stream.avail_out = room;
    status = inflate(&stream, Z_NO_FLUSH);
    unread -= given - stream.avail_in;
    size += room - stream.avail_out;
    if (status == Z_MEM_ERROR) {
      throw std::bad_alloc();
    }
    if (size > max_bytes) {
      refuse(ErrorKind::kBodyTooLarge, "the body must have at most ", max_bytes,
             " bytes once unpacked (--max-body-bytes); got more");
    }
    if (status != Z_OK && status != Z_STREAM_END) {
      refuse(ErrorKind::kBadRequest, "the body must be ", name_of(coding),
             " data, as Content-Encoding says; it is not, or it is cut short, after ", size,
             " unpacked bytes");
    }
  }
  if (unread > 0) {
    refuse(ErrorKind::kBadRequest, "the body must end with its ", name_of(coding), " data; ",
           unread, " bytes are left over");
  }
  out.resize(size);
  return out;
}

void pack(const void* data, std::size_t bytes, bool is_last, z_stream& stream, std::string& out) {
  stream.next_in = input(data);
  do {
    const uInt given = step(bytes);
    stream.avail_in = given;
    std::size_t size = out.size();
    out.resize(size + std::max<std::size_t>(deflateBound(&stream, given), 256));
    const uInt room = step(out.size() - size);
    stream.next_out = reinterpret_cast<Bytef*>(out.data()) + size;
    stream.avail_out = room;
    deflate(&stream, is_last && given == bytes ? Z_FINISH : Z_NO_FLUSH);
    bytes -= given - stream.avail_in;
    out.resize(size + room - stream.avail_out);
  } while (bytes > 0 || stream.avail_out == 0);
}

std::string pack_all(Coding coding, const HttpReply& reply) {
  Deflater deflater(coding);
  std::string packed;
  pack(reply.text.data(), reply.text.size(), reply.blobs.empty(), deflater.stream, packed);
  for (std::size_t i = 0; i < reply.blobs.size(); ++i) {
    pack(reply.blobs[i].data, reply.blobs[i].bytes, i + 1 == reply.blobs.size(), deflater.stream,
         packed);
  }
  return packed;
}

}  // namespace

bool is_word(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(), [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? static_cast<char>(a + 'a' - 'A') : a) == b;
  });
}

std::optional<Coding> coding_of(std::string_view content_encoding) {
  const std::string_view name = trimmed(content_encoding);
  if (name.empty() || is_word(name, "identity")) {
    return Coding::kIdentity;
  }
  if (is_word(name, "gzip") || is_word(name, "x-gzip")) {
    return Coding::kGzip;
  }
  if (is_word(name, "deflate")) {
    return Coding::kDeflate;
  }
  return std::nullopt;
}

Coding wanted_coding(std::string_view accept_encoding) {
  Coding wanted = Coding::kIdentity;
  double best = 0;
  while (!accept_encoding.empty()) {
    std::string_view element = cut(accept_encoding, ',');
    const std::string_view name = cut(element, ';');
    const std::optional<Coding> coding = is_word(name, "*") ? Coding::kGzip : coding_of(name);
    const double weight = weight_of(trimmed(element));
    if (!name.empty() && coding.has_value() && weight > best) {
      wanted = *coding;
      best = weight;
    }
  }
  return wanted;
}

std::shared_ptr<RequestBody> unpack_body(const RequestBody& packed, Coding coding,
                                         std::optional<std::size_t> json_size,
                                         std::size_t max_bytes, MemoryBudget& memory) {
  const std::vector<std::byte> bytes = unpack(packed.json(), coding, max_bytes);
  if (json_size.value_or(0) > bytes.size()) {
    refuse(ErrorKind::kBadRequest,
           "Inference-Header-Content-Length must be at most the length of the body once unpacked (",
           bytes.size(), "); got ", *json_size);
  }
  auto body = std::make_shared<RequestBody>(bytes.size(), json_size.value_or(bytes.size()),
                                            memory.take(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), body->bytes().begin());
  return body;
}

void pack_reply(Coding coding, HttpReply& reply) {
  std::size_t size = reply.text.size();
  for (const runtime::Tensor& blob : reply.blobs) {
    size += blob.bytes;
  }
  if (coding == Coding::kIdentity || size < kMinPackedBytes) {
    return;
  }
  std::string packed;
  try {
    packed = pack_all(coding, reply);
  } catch (const std::bad_alloc&) {
    return;
  }
  reply.headers.emplace_back("Content-Encoding", name_of(coding));
  reply.headers.emplace_back("Vary", "Accept-Encoding");
  reply.text = std::move(packed);
  reply.blobs.clear();
}

}  // namespace ikbo::server
