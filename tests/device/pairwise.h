// SPDX-License-Identifier: Apache-2.0
// Few rows of choices among which every two choices meet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace ikbo::test {

// sizes[p] is how many choices parameter p has; rows[r][p] is which of them row r takes. A row
// begins with a pair that no row has yet; each other parameter in turn takes the choice that adds
// the most such pairs at a cost up to `max_cost`, among equals the one with the least cost. `cost`
// is called with -1 for what is not chosen yet, which should cost the least.
inline std::vector<std::vector<int>> pairwise_rows(
    const std::vector<int>& sizes, const std::function<double(const std::vector<int>&)>& cost,
    double max_cost) {
  const std::size_t count = sizes.size();
  std::vector<std::size_t> begin(count + 1);
  for (std::size_t p = 0; p < count; ++p) begin[p + 1] = begin[p] + sizes[p];
  const std::size_t all = begin[count];
  std::vector<char> is_covered(all * all);
  const auto covered = [&](std::size_t p, int a, std::size_t q, int b) -> char& {
    return p < q ? is_covered[(begin[p] + a) * all + begin[q] + b]
                 : is_covered[(begin[q] + b) * all + begin[p] + a];
  };
  const auto complete = [&](std::vector<int>& row, std::size_t p) {
    int best = 0;
    int most_pairs = -1;
    double least = 0;
    for (int choice = 0; choice < sizes[p]; ++choice) {
      row[p] = choice;
      const double price = cost(row);
      int pairs = 0;
      for (std::size_t q = 0; q < count; ++q) {
        if (q != p && row[q] >= 0 && !covered(p, choice, q, row[q])) ++pairs;
      }
      if (price > max_cost) pairs = 0;
      if (pairs > most_pairs || (pairs == most_pairs && price < least)) {
        best = choice;
        most_pairs = pairs;
        least = price;
      }
    }
    row[p] = best;
  };
  std::vector<std::vector<int>> rows;
  for (std::size_t p = 0; p < count; ++p) {
    for (std::size_t q = p + 1; q < count; ++q) {
      for (int a = 0; a < sizes[p]; ++a) {
        for (int b = 0; b < sizes[q]; ++b) {
          if (covered(p, a, q, b)) continue;
          std::vector<int> row(count, -1);
          row[p] = a;
          row[q] = b;
          for (std::size_t r = 0; r < count; ++r) {
            if (row[r] < 0) complete(row, r);
          }
          for (std::size_t r = 0; r < count; ++r) {
            for (std::size_t s = r + 1; s < count; ++s) covered(r, row[r], s, row[s]) = 1;
          }
          rows.push_back(row);
        }
      }
    }
  }
  return rows;
}

}  // namespace ikbo::test
