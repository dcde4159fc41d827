// SPDX-License-Identifier: Apache-2.0
// A 128-bit hash of bytes (XXH3) under a secret of this process, so that nobody outside can prepare
// two contents of one hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace ikbo::runtime {

struct ContentHash {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  bool operator==(const ContentHash&) const = default;
};

using HashSecret = std::array<std::byte, 192>;

// From the operating system's random numbers.
HashSecret make_hash_secret();

// Not thread-safe.
class ContentHasher {
 public:
  // `secret` must outlive it.
  explicit ContentHasher(const HashSecret& secret);
  ~ContentHasher();
  ContentHasher(const ContentHasher&) = delete;
  ContentHasher& operator=(const ContentHasher&) = delete;

  void begin();
  void add(const void* data, std::size_t bytes);
  // Of all that was added since `begin`, as one sequence of bytes.
  ContentHash finish() const;

 private:
  struct State;
  const HashSecret& secret_;
  std::unique_ptr<State> state_;
};

}  // namespace ikbo::runtime
