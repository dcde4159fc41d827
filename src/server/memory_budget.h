// SPDX-License-Identifier: Apache-2.0
// A limit on the bytes that requests hold at once, over all connections. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "server/request_error.h"

namespace ikbo::server {

class MemoryBudget {
 public:
  // Bytes taken from the budget, given back at its end.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Lease() {
      if (budget_ != nullptr) {
        budget_->used_ -= bytes_;
      }
    }

    // Takes over what `other` holds of the same budget.
    void add(Lease other) {
      if (budget_ == nullptr) {
        *this = std::move(other);
      } else if (std::exchange(other.budget_, nullptr) != nullptr) {
        bytes_ += other.bytes_;
      }
    }

   private:
    friend class MemoryBudget;
    Lease(MemoryBudget& budget, std::size_t bytes) : budget_(&budget), bytes_(bytes) {}
    MemoryBudget* budget_ = nullptr;
    std::size_t bytes_ = 0;
  };

  explicit MemoryBudget(std::size_t limit) : limit_(limit) {}

  // Throws RequestError(kOutOfMemory) when less than that is left.
  Lease take(std::size_t bytes) {
    std::size_t used = used_.load();
    do {
      if (bytes > limit_ - used) {
        refuse(ErrorKind::kOutOfMemory, "the request needs ", bytes,
               " bytes; of the memory for all requests (--max-request-memory ", limit_, ") ",
               limit_ - used, " bytes are left now");
      }
    } while (!used_.compare_exchange_weak(used, used + bytes));
    return {*this, bytes};
  }

  std::size_t used() const { return used_; }
  std::size_t limit() const { return limit_; }

 private:
  const std::size_t limit_;
  std::atomic<std::size_t> used_ = 0;
};

}  // namespace ikbo::server
