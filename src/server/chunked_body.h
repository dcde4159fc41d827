// SPDX-License-Identifier: Apache-2.0
// A body sent in chunks (Transfer-Encoding: chunked), collected as Beast's parser finds them.
#pragma once

#include <boost/beast/core/string_type.hpp>
#include <boost/system/error_code.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "server/memory_budget.h"
#include "server/request_body.h"
#include "server/request_error.h"

namespace ikbo::server {

class ChunkedBody {
 public:
  using ErrorCode = boost::system::error_code;

  // `memory` must outlive it.
  ChunkedBody(std::size_t max_bytes, MemoryBudget& memory);
  ChunkedBody(const ChunkedBody&) = delete;
  ChunkedBody& operator=(const ChunkedBody&) = delete;

  // Has `parser`, which stands behind the head, report the body here as long as it reads.
  template <typename Parser>
  void collect_from(Parser& parser) {
    parser.on_chunk_header(on_header_);
    parser.on_chunk_body(on_body_);
  }

  // Why the parser stopped with `error`, if it was for a limit or for want of memory.
  std::optional<RequestError> refusal(const ErrorCode& error) const;
  // The body, after its last chunk; `json_size` as in BodyPlan. Throws RequestError and
  // std::bad_alloc.
  std::shared_ptr<RequestBody> finish(std::optional<std::size_t> json_size);

 private:
  using Text = boost::beast::string_view;

  void expect(std::uint64_t bytes, ErrorCode& error);
  std::size_t add(std::string_view bytes, ErrorCode& error);
  void refuse_with(const RequestError& refusal, ErrorCode& error);
  RequestError too_large() const;

  const std::size_t max_bytes_;
  MemoryBudget& memory_;
  MemoryBudget::Lease lease_;
  std::size_t expected_ = 0;  // bytes of the chunks that were announced
  std::vector<char> bytes_;
  std::optional<RequestError> refusal_;
  // The parser refers to these.
  std::function<void(std::uint64_t, Text, ErrorCode&)> on_header_;
  std::function<std::size_t(std::uint64_t, Text, ErrorCode&)> on_body_;
};

}  // namespace ikbo::server
