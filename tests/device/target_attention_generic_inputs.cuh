// SPDX-License-Identifier: Apache-2.0
// Cases of the generic kernel of ikbo::target_attention and their inputs: elements that no
// candidate may read, and what lies between elements, are NaN.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_inputs.cuh"
#include "device_memory.h"

namespace ikbo::test {

enum class Layout { kContiguous, kShifted, kPaddedOdd, kPaddedEven, kTransposed, kStrided };

inline constexpr std::array kLayoutNames{"contiguous", "shifted",    "paddedodd",
                                         "paddedeven", "transposed", "strided"};

struct GenericCase {
  int num_users;
  int num_candidates;
  int num_queries = 1;
  int num_keys = 100;
  int num_heads = 2;
  int num_kv_heads = 2;
  int head_dim = 64;
  DType dtype = DType::kFloat16;
  Layout layout = Layout::kContiguous;
  bool has_user_lengths = true;
  bool has_cand_lengths = false;
  bool has_mask = false;
  bool is_packed = false;  // histories one after the other
  double scale = 0.2;
  int longest = 0;  // length of a user, or candidate; 0: num_keys

  int longest_history() const { return longest > 0 ? longest : num_keys; }
  std::string id() const {
    std::string scale_name = std::to_string(static_cast<int>(std::abs(scale) * 1000));
    if (scale < 0) scale_name = "minus" + scale_name;
    return "U" + std::to_string(num_users) + "_B" + std::to_string(num_candidates) + "_Q" +
           std::to_string(num_queries) + "_S" + std::to_string(num_keys) + "_H" +
           std::to_string(num_heads) + "_G" + std::to_string(num_kv_heads) + "_D" +
           std::to_string(head_dim) + "_" + std::string(name_of(dtype)) + "_" +
           kLayoutNames[static_cast<std::size_t>(layout)] + "_l" +
           std::to_string(has_user_lengths) + std::to_string(has_cand_lengths) +
           std::to_string(has_mask) + (is_packed ? "_packed" : "") + "_s" + scale_name;
  }
};

// A tensor of four dimensions in device memory.
struct Operand {
  void* data;
  DType dtype;
  std::int64_t sizes[4];
  std::int64_t strides[4];
};

// Random elements in the rows (of the first two dimensions) that are read; nullptr: all are.
__global__ inline void fill_kernel(Operand o, const std::uint8_t* is_read, std::uint64_t seed) {
  const std::int64_t count = o.sizes[0] * o.sizes[1] * o.sizes[2] * o.sizes[3];
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const std::int64_t d = i % o.sizes[3];
    const std::int64_t head = i / o.sizes[3] % o.sizes[2];
    const std::int64_t row = i / o.sizes[3] / o.sizes[2];
    if (is_read != nullptr && is_read[row] == 0) continue;
    const std::int64_t at = row / o.sizes[1] * o.strides[0] + row % o.sizes[1] * o.strides[1] +
                            head * o.strides[2] + d * o.strides[3];
    store_value(o.data, at, o.dtype, random_value(Values::kNormal, 1.0f, seed + i));
  }
}

// Buffers of one operand, its elements random and all else NaN.
class OperandMemory {
 public:
  OperandMemory(std::array<std::int64_t, 4> sizes, const GenericCase& c,
                const std::uint8_t* is_read, std::uint64_t seed) {
    const auto [n0, n1, n2, n3] = sizes;
    std::int64_t row = n3;  // elements between two heads
    if (c.layout == Layout::kPaddedOdd) row = n3 + n3 % 2 + 1;
    if (c.layout == Layout::kPaddedEven) row = (n3 + 1) / 2 * 2 + 2;
    if (c.layout == Layout::kStrided) row = 2 * n3;
    strides_ = {n1 * n2 * row, n2 * row, row, c.layout == Layout::kStrided ? 2 : 1};
    if (c.layout == Layout::kTransposed) strides_ = {n1 * n2, n2, 1, n0 * n1 * n2};
    const std::int64_t shift = c.layout == Layout::kShifted ? 1 : 0;
    const auto bytes = static_cast<std::int64_t>(size_of(c.dtype));
    buffer_ = std::make_unique<GuardedBuffer>((n0 * n1 * n2 * row + shift) * bytes);
    data_ = buffer_->data<char>() + shift * bytes;
    fill_kernel<<<512, 256>>>({.data = data_,
                               .dtype = c.dtype,
                               .sizes = {n0, n1, n2, n3},
                               .strides = {strides_[0], strides_[1], strides_[2], strides_[3]}},
                              is_read, seed << 40);
  }
  void* data() const { return data_; }
  const std::array<std::int64_t, 4>& strides() const { return strides_; }

 private:
  std::unique_ptr<GuardedBuffer> buffer_;
  std::array<std::int64_t, 4> strides_{};
  void* data_ = nullptr;
};

// What a case draws at random.
struct HostInputs {
  explicit HostInputs(const GenericCase& c)
      : index(static_cast<std::size_t>(c.num_candidates)),
        user_lengths(static_cast<std::size_t>(c.num_users), c.longest_history()),
        cand_lengths(static_cast<std::size_t>(c.num_candidates), c.longest_history()),
        user_offsets{0},
        mask(c.has_mask ? std::size_t(c.num_users) * c.num_keys : 0) {
    std::mt19937 random(static_cast<unsigned>(c.num_candidates * 131 + c.num_users));
    for (std::size_t b = 0; b < index.size(); ++b) {
      // Uneven: the square puts more candidates on the first users; some users have none.
      const double at = static_cast<double>(b) / static_cast<double>(index.size());
      index[b] = static_cast<std::int32_t>(at * at * c.num_users);
    }
    std::shuffle(index.begin(), index.end(), random);
    if (c.has_user_lengths) draw(user_lengths, random);
    if (c.has_cand_lengths) draw(cand_lengths, random);
    for (const std::int32_t length : user_lengths) {
      user_offsets.push_back(user_offsets.back() + (c.is_packed ? length : 0));
    }
    for (std::size_t i = 0; i < mask.size(); ++i) {
      // Of a few users, no key counts in whole blocks.
      const bool is_gap = i / c.num_keys % 3 == 1 && i % c.num_keys / 70 % 2 == 0;
      mask[i] = !is_gap && random() % 4 != 0;
    }
    mark_read_rows(c);
  }

  static void draw(std::vector<std::int32_t>& lengths, std::mt19937& random) {
    const std::int32_t longest = lengths.empty() ? 0 : lengths.front();
    for (std::int32_t& length : lengths) {
      length = static_cast<std::int32_t>(random() % (longest + 1));
    }
    if (!lengths.empty()) lengths.front() = longest;
    if (lengths.size() > 1) lengths[1] = 0;
    if (lengths.size() > 2) lengths[2] = std::min(1, longest);
  }

  // Rows of K and V that count for any candidate; packed histories have two rows more, of no user.
  void mark_read_rows(const GenericCase& c) {
    const std::size_t rows =
        c.is_packed ? user_offsets.back() + 2 : std::size_t(c.num_users) * c.num_keys;
    is_read.assign(rows, 0);
    std::vector<std::int32_t> keys(user_lengths.size());
    for (std::size_t b = 0; b < index.size(); ++b) {
      std::int32_t& most = keys[static_cast<std::size_t>(index[b])];
      most = std::max(most, cand_lengths[b]);
    }
    for (std::size_t u = 0; u < keys.size(); ++u) {
      const std::size_t first =
          c.is_packed ? user_offsets[u] : u * static_cast<std::size_t>(c.num_keys);
      for (std::int32_t key = 0; key < std::min(keys[u], user_lengths[u]); ++key) {
        is_read[first + key] = mask.empty() || mask[first + key] != 0;
      }
    }
  }

  std::vector<std::int32_t> index, user_lengths, cand_lengths, user_offsets;
  std::vector<std::uint8_t> mask, is_read;
};

template <typename T>
std::unique_ptr<GuardedBuffer> copy_of(const std::vector<T>& values) {
  auto buffer = std::make_unique<GuardedBuffer>(values.size() * sizeof(T));
  IKBO_CUDA_CHECK(
      cudaMemcpy(buffer->data(), values.data(), buffer->bytes(), cudaMemcpyHostToDevice), "values");
  return buffer;
}

inline std::array<std::int64_t, 4> history_sizes(const GenericCase& c, const HostInputs& host) {
  const auto rows = static_cast<std::int64_t>(host.is_read.size());
  if (c.is_packed) return {1, rows, c.num_kv_heads, c.head_dim};
  return {c.num_users, c.num_keys, c.num_kv_heads, c.head_dim};
}

}  // namespace ikbo::test
