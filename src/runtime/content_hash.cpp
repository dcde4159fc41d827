// SPDX-License-Identifier: Apache-2.0
#include "runtime/content_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <random>

namespace ikbo::runtime {

struct ContentHasher::State {
  XXH3_state_t xxh3;
};

HashSecret make_hash_secret() {
  static_assert(sizeof(HashSecret) >= XXH3_SECRET_SIZE_MIN);
  std::random_device random;
  HashSecret secret;
  for (std::size_t at = 0; at < secret.size(); at += sizeof(unsigned)) {
    const unsigned value = random();
    std::memcpy(secret.data() + at, &value, sizeof(value));
  }
  return secret;
}

ContentHasher::ContentHasher(const HashSecret& secret)
    : secret_(secret), state_(std::make_unique<State>()) {}

ContentHasher::~ContentHasher() = default;

void ContentHasher::begin() {
  XXH3_128bits_reset_withSecret(&state_->xxh3, secret_.data(), secret_.size());
}

void ContentHasher::add(const void* data, std::size_t bytes) {
  if (bytes > 0) {
    XXH3_128bits_update(&state_->xxh3, data, bytes);
  }
}

ContentHash ContentHasher::finish() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  return {hash.low64, hash.high64};
}

}  // namespace ikbo::runtime
