// SPDX-License-Identifier: Apache-2.0
#include "server/trace_context.h"

#include <algorithm>
#include <cstddef>
#include <random>

namespace ikbo::server {
namespace {

constexpr std::size_t kLength = 55;  // of version 00; later ones may go on behind a dash
constexpr std::size_t kMaxStateLength = 512;
constexpr std::ptrdiff_t kMaxStateMembers = 32;

// Capital letters are not allowed.
int hex_value(char c) {
  if (c >= '0' && c <= '9') {
    return c - '0';
  }
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// Two digits for each byte; `text` has them all.
bool read_hex(std::string_view text, std::span<std::uint8_t> bytes) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const int high = hex_value(text[2 * i]);
    const int low = hex_value(text[2 * i + 1]);
    if (high < 0 || low < 0) {
      return false;
    }
    bytes[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  return true;
}

bool is_state_usable(std::string_view state) {
  return state.size() <= kMaxStateLength &&
         std::count(state.begin(), state.end(), ',') < kMaxStateMembers &&
         std::all_of(
             state.begin(), state.end(),
             [](char c) { return (c >= ' ' && c <= '~') || c == '\t'; });
}

std::mt19937_64& generator() {
  thread_local std::mt19937_64 numbers = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  return numbers;
}

template <std::size_t Size>
std::array<std::uint8_t, Size> make_id() {
  std::array<std::uint8_t, Size> id{};
  while (id == std::array<std::uint8_t, Size>{}) {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < Size; ++i, bits >>= 8) {
      if (i % sizeof(bits) == 0) {
        bits = generator()();
      }
      id[i] = static_cast<std::uint8_t>(bits);
    }
  }
  return id;
}

}  // namespace

std::optional<SpanContext> parse_trace_context(std::string_view traceparent,
                                               std::string_view tracestate) {
  if (traceparent.size() < kLength || traceparent[2] != '-' || traceparent[35] != '-' ||
      traceparent[52] != '-') {
    return std::nullopt;
  }
  std::array<std::uint8_t, 1> version{};
  std::array<std::uint8_t, 1> flags{};
  SpanContext context;
  if (!read_hex(traceparent.substr(0, 2), version) ||
      !read_hex(traceparent.substr(3, 32), context.trace_id) ||
      !read_hex(traceparent.substr(36, 16), context.span_id) ||
      !read_hex(traceparent.substr(53, 2), flags) || !context.is_valid()) {
    return std::nullopt;
  }
  const bool is_longer = traceparent.size() > kLength;
  if (version[0] == 0xff || (is_longer && (version[0] == 0 || traceparent[kLength] != '-'))) {
    return std::nullopt;
  }
  context.is_sampled = (flags[0] & 1) != 0;
  if (is_state_usable(tracestate)) {
    context.state = tracestate;
  }
  return context;
}

TraceId make_trace_id() { return make_id<16>(); }
SpanId make_span_id() { return make_id<8>(); }
double random_share() { return std::uniform_real_distribution<double>(0, 1)(generator()); }

std::string hex_of(std::span<const std::uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace ikbo::server
