// SPDX-License-Identifier: Apache-2.0
// W3C Trace Context: which trace a request belongs to, by its headers traceparent and tracestate.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ikbo::server {

using TraceId = std::array<std::uint8_t, 16>;  // all zero: none
using SpanId = std::array<std::uint8_t, 8>;

struct SpanContext {
  TraceId trace_id{};
  SpanId span_id{};
  bool is_sampled = false;
  std::string state;  // tracestate, as it came

  bool is_valid() const { return trace_id != TraceId{} && span_id != SpanId{}; }
};

// Nothing for a traceparent that the recommendation calls invalid. A tracestate over its limits is
// left out. Of several tracestate headers the values come joined by commas.
std::optional<SpanContext> parse_trace_context(std::string_view traceparent,
                                               std::string_view tracestate);

// Random, never all zero. Thread-safe.
TraceId make_trace_id();
SpanId make_span_id();
// From 0 to 1, without 1.
double random_share();

// Lower case.
std::string hex_of(std::span<const std::uint8_t> bytes);

}  // namespace ikbo::server
