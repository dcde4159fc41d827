// SPDX-License-Identifier: Apache-2.0
// A request's body in memory: a JSON document, then (binary tensor extension) raw tensors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <utility>

#include "server/aligned_buffer.h"
#include "server/memory_budget.h"

namespace ikbo::server {

// The first raw tensor starts at a multiple of kBufferAlignment, whatever the length of the JSON,
// so that tensors can be used where they were received. kPadding readable bytes follow the body:
// the JSON parser reads beyond its input.
class RequestBody {
 public:
  static constexpr std::size_t kPadding = 64;

  // `json_size` must be at most `size`; `lease` is for the memory. The bytes are uninitialised
  // until written through `bytes`.
  RequestBody(std::size_t size, std::size_t json_size, MemoryBudget::Lease lease = {})
      : lease_(std::move(lease)),
        size_(size),
        json_size_(json_size),
        offset_((kBufferAlignment - json_size % kBufferAlignment) % kBufferAlignment),
        storage_(make_aligned_buffer(offset_ + size + kPadding)) {
    std::fill_n(storage_.get() + offset_ + size, kPadding, std::byte{0});
  }

  // More of the memory that it is.
  void hold(MemoryBudget::Lease lease) { lease_.add(std::move(lease)); }

  std::span<std::byte> bytes() { return {storage_.get() + offset_, size_}; }
  std::string_view json() const {
    return {reinterpret_cast<const char*>(storage_.get() + offset_), json_size_};
  }
  std::span<const std::byte> binary() const {
    return {storage_.get() + offset_ + json_size_, size_ - json_size_};
  }

 private:
  MemoryBudget::Lease lease_;
  std::size_t size_;
  std::size_t json_size_;
  std::size_t offset_;
  AlignedBuffer storage_;
};

}  // namespace ikbo::server
