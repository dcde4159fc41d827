// SPDX-License-Identifier: Apache-2.0
// Where the bits of two results of an operator differ, as text; "" where they do not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ios>
#include <sstream>
#include <string>
#include <vector>

#include "ikbo/types.h"

namespace ikbo::test {

// The bits of each element.
template <typename Word>
std::vector<std::uint32_t> elements_of(const std::vector<Word>& words, DType dtype) {
  const std::size_t size = size_of(dtype);
  std::vector<std::uint32_t> elements(words.size() * sizeof(Word) / size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(words.data());
  for (std::size_t i = 0; i < elements.size(); ++i) {
    std::memcpy(&elements[i], bytes + i * size, size);
  }
  return elements;
}

// Of [rows, ...] with `row_size` elements a row.
template <typename Word>
std::string first_different_element(const std::vector<Word>& got, const std::vector<Word>& expected,
                                    DType dtype, std::size_t row_size) {
  const std::vector<std::uint32_t> a = elements_of(got, dtype);
  const std::vector<std::uint32_t> b = elements_of(expected, dtype);
  std::ostringstream text;
  if (a.size() != b.size()) {
    text << a.size() << " elements, not " << b.size();
    return text.str();
  }
  std::size_t count = 0;
  std::size_t first = 0;
  for (std::size_t i = a.size(); i-- > 0;) {
    if (a[i] != b[i]) {
      ++count;
      first = i;
    }
  }
  if (count == 0) return "";
  text << count << " of " << a.size() << " elements differ, the first is " << first % row_size
       << " of row " << first / row_size << ": 0x" << std::hex << a[first] << ", not 0x"
       << b[first];
  return text.str();
}

// Rows of `got` for which `is_poisoned(row)` holds must have no finite element, the others the bits
// of `clean`.
template <typename Word, typename IsPoisoned>
std::string first_leak(const std::vector<Word>& got, const std::vector<Word>& clean, DType dtype,
                       std::size_t row_size, IsPoisoned&& is_poisoned) {
  const std::uint32_t exponent = dtype == DType::kFloat16    ? 0x7C00
                                 : dtype == DType::kBFloat16 ? 0x7F80
                                                             : 0x7F800000;
  const std::vector<std::uint32_t> a = elements_of(got, dtype);
  const std::vector<std::uint32_t> b = elements_of(clean, dtype);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool poisoned = is_poisoned(i / row_size);
    if (poisoned ? (a[i] & exponent) == exponent : a[i] == b[i]) continue;
    std::ostringstream text;
    text << "element " << i % row_size << " of row " << i / row_size << " is 0x" << std::hex
         << a[i];
    if (poisoned) {
      text << ", which is finite, though the row is poisoned";
    } else {
      text << ", without poison elsewhere 0x" << b[i];
    }
    return text.str();
  }
  return "";
}

}  // namespace ikbo::test
